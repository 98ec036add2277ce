"""Contains code shared by the `webhook`, `otlp`, and `eventhubs` sinks (over HTTPS).

The public modules are `endpoint` (sends requests and classifies responses), `config` (settings), `urls` (validation of
URLs), and `signature` (webhook signatures).
"""
