"""The metrics of the agent. The public module is `metrics` (Metrics, OutboxReading)."""
