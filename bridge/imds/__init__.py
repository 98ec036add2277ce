"""The Instance Metadata Service: its requests, and its Scheduled Events document.

This is the only package that knows the URLs of the service. Public: `client` (ImdsClient) and `document`
(parse_document, parse_identity).
"""
