"""The agent's health: the pages /healthz, /readyz, and /metrics.

Public: `reporter` (HealthReporter), `readiness` (Readiness), `server` (HealthServer).
"""
