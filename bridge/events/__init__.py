"""Detects changes between two documents, and defines the record of a change.

`tracker` compares documents, `transitions` classifies each change, `record` defines the format and the ID of a record,
and `environment` converts a record to environment variables. No module reads a clock, a file, or a socket.
"""
