"""Example configurations for the `init` command and the documentation, with one sink in each file."""
