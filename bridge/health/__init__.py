"""The agent's health: the pages /healthz, /readyz, and /metrics, and a client for /readyz.

Public: `reporter` (HealthReporter), `readiness` (Readiness), `server` (HealthServer), `client`.
"""
