"""What the sinks over HTTP share: webhook, otlp, and Event Hubs over HTTPS.

Public: `endpoint` (Endpoint: one URL, one request, and what each answer means), `config` (HttpConfig, check_header,
one_of), `urls` (http_url, plain_url, origin), `signature` (Signer: Standard Webhooks). `errors` belongs to `endpoint`.
"""
