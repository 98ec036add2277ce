"""Implements `check-config`, which checks the configuration, this machine, and optionally the destinations."""
