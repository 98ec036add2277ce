"""The `otlp` sink. The public module is `sink`."""
