"""The state of the agent: in memory, with a copy on disk for the next start.

Memory is the source of truth while the agent runs. One thread, the saver, writes the copy, so every disk failure has
the same meaning (the copy is behind) and the same remedy (write it again).

Public: `outbox` (Outbox), `state` (State), `rows` (the rows of its tables), `records`, `deliveries`, `approvals`, and
`retention` (pure functions over the state), `database` (files, for commands), `lock` (one agent per directory).
"""
