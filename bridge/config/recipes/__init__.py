"""Example configurations for `init` and the documentation, one sink in each file."""
