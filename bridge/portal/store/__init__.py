"""The portal's database: the only place that knows SQL, one text for SQLite and PostgreSQL.

Public: `database` opens it and runs functions over a connection, in a few threads; `ingest` takes records in, `events`
lists what follows from them, `audit` adds to the chain and reads it.
"""
