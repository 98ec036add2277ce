"""The sink `otlp`: OpenTelemetry logs over HTTP."""
