"""The agent's numbers, as Prometheus reads them.

Public: `metrics` (Metrics). `collectors` reads the outbox's totals at each scrape.
"""
