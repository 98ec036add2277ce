"""`check-config`: checks the configuration, this machine, and on request the destinations."""
