"""The agent's numbers, as Prometheus reads them.

Public: `metrics` (Metrics, OutboxReading). `collectors` reads the document and the outbox at each scrape.
"""
