"""Contains code shared by the sinks `webhook`, `otlp`, and `eventhubs` (over HTTPS).

The public modules are `endpoint` (sends requests and classifies responses), `config` (settings), `urls` (validation of
URLs), and `signature` (webhook signatures).
"""
