"""Detects changes between two Scheduled Events documents, and defines the record that reports a change.

The modules read no clock, file, or socket, so tests can call all functions directly. The module `tracker` compares
documents, `transitions` classifies each change, and `record` defines the format and the ID of a record. The module
`environment` converts a record to environment variables.
"""
