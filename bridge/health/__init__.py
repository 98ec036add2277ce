"""The health of the agent: the pages /healthz, /readyz, and /metrics.

The public modules are `reporter` (HealthReporter), `readiness` (Readiness), and `server` (HealthServer).
"""
