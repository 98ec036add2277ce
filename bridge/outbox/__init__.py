"""The durable state: the last document, the records, what each sink still has to get, and approvals.

SQLite on disk, or in memory while the disk refuses. One thread commits what has gathered. Public: `outbox` (Outbox),
`reader` (OutboxFile: the outbox as commands see it), `locks` (DirectoryLock).
"""
