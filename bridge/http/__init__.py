"""Provides HTTP clients with a deadline for every request.

The public modules are `session`, `connection`, `retry_after`, `failures`, `tls_files`, and `lean_requests`.
"""
