"""The configuration file: TOML in, frozen settings out, all mistakes at once.

Public: `loader` (load, load_top, find_config, state_directory), `settings`, `approval`, `trusted_keys`, `json_schema`,
`secret_keys`, `masking`, and `mistakes` and `toml` for other TOML files and requests.
"""
