"""The portal's database. Only this package contains SQL.

Public modules: `database`, `ingest`, `events`, and `audit`.
"""
