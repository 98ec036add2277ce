"""The state of the agent: kept in memory, and copied to a file for the next start.

Memory is the source of truth while the agent runs. One thread, the saver, writes the file. Every disk failure
therefore means that the file is behind, and the agent always responds by writing the missing rows again.

The public modules are `outbox` (Outbox), `state` (State), `rows` (the rows of the tables), `records`, `deliveries`,
`approvals`, and `retention` (functions on the state), `database` (files), and `lock` (one agent per directory).
"""
