"""Contains the HTTP code that the `webhook`, `otlp`, and `eventhubs` sinks share.

The public modules are `endpoint` (sends requests and classifies responses), `config` (settings), `urls` (validation of
URLs), and `signature` (webhook signatures).
"""
