"""Defines the agent's metrics.

Other packages use `Metrics` and `OutboxReading` from `metrics`.
"""
