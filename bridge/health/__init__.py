"""Serves the health of the agent on the pages /healthz, /readyz, /metrics, and /serving.

The public modules are `reporter` (HealthReporter), `readiness` (Readiness), and `server` (HealthServer).
"""
