"""What the sinks over HTTP share: webhook, otlp, and Event Hubs over HTTPS.

Public: `endpoint` (Endpoint: one URL, one request, and what each answer means), `config` (HttpConfig and the checks of
URLs and headers), `signature` (Signer: Standard Webhooks). `errors` belongs to `endpoint`.
"""
