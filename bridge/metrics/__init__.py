"""Defines the agent's metrics.

The public modules are `metrics` and `otlp_push`.
"""
