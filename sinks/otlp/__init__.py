"""The sink `otlp`. The public module is `sink`."""
