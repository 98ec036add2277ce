"""How the agent is: /healthz, /readyz and /metrics, and the question a command puts to a running agent.

Public: `reporter` (HealthReporter), `report` (Readiness), `server` (HealthServer), `probe`.
"""
