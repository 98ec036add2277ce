"""The agent's health: the pages /healthz, /readyz and /metrics, and how a command asks a running agent.

Public: `reporter` (HealthReporter), `readiness` (Readiness), `server` (HealthServer), `client`.
"""
