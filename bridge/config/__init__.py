"""Reads and validates the TOML configuration file, and returns immutable settings.

Other packages can import `loader`, `settings`, `approval`, `trusted_keys`, `json_schema`, `secret_keys`, and `masking`.
They can also import `mistakes` and `toml`, to validate other TOML files and requests.
"""
