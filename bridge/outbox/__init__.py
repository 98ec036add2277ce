"""The durable state: the last document, the records, what each sink still has to get, and approvals.

A SQLite file, or a copy in memory while the disk refuses. One thread owns it and commits together what has gathered;
functions over a connection are handed to it, and commands beside the agent call the very same functions.

Public: `outbox` (Outbox: read, write, exclusive, tend, close), the functions in `records`, `deliveries`, `approvals`
and `meta`, `reader` (OutboxFile: the outbox as commands see it), `locks` (DirectoryLock, is_locked),
`volume` (how large it is).
"""
