"""The sink `otlp`: OpenTelemetry logs over HTTP.

Public: `sink` (OtlpSink, OtlpConfig). `encoding` turns records into protobuf, and is imported with the first send.
"""
