"""Implements `check-config`, which checks the configuration and this machine.

With `--connect`, it also checks the destinations.
"""
