"""Azure's Instance Metadata Service: its HTTP, its Scheduled Events document, and where it is found.

The only package that knows the service's URLs. Public: `client` (ImdsClient), `document` (parse_document,
parse_identity), `discovery`.
"""
