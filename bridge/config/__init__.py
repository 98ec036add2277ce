"""Reads and validates the TOML configuration file, and returns immutable settings.

Other packages can import `loader`, `settings`, `approval`, `trusted_keys`, `json_schema`, `secret_keys`, and `masking`.
The modules `mistakes` and `toml` also validate other TOML files and requests.
"""
