"""The portal's database. Only this package contains SQL, and the same statements run on SQLite and PostgreSQL.

Public modules: `database` opens the database and runs functions in threads. `ingest` stores records. `events` lists
events. `audit` stores and reads audit entries.
"""
