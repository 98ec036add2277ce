"""The agent's health: the pages /healthz, /readyz and /metrics, and how a command asks a running agent.

Public: `reporter` (HealthReporter), `report` (Readiness), `server` (HealthServer), `probe`.
"""
