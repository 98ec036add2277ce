"""The configuration file: TOML in, frozen settings out, every mistake at once.

Public: `loader` (load, find_config, state_directory), `settings`, `approval`, `sinks` (installed, sink_class),
`trusted_keys`.
"""
