"""Implements `check-config`. With `--connect`, it also checks the destinations."""
