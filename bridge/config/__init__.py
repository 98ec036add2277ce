"""The configuration: reads the TOML file, checks it, and returns immutable settings.

The public modules are `loader` (load, load_top, find_config, state_directory), `settings`, `approval`, `trusted_keys`,
`json_schema`, `secret_keys`, and `masking`. The modules `mistakes` and `toml` also serve other TOML files and requests.
"""
