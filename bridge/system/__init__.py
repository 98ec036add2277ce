"""Provides access to the operating system, secrets, and tokens.

The public modules are `run_and_kill`, `secrets`, `access_tokens`, `scopes`, `threads`, `systemd`, `boot`,
`ephemeral_disk`, `permissions`, and `extras`.
"""
