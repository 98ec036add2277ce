"""Keeps the agent's state in memory, and saves it to a file for the next start.

While the agent runs, the state in memory is authoritative. If a write fails, the saver retries later.

Other packages use the `outbox.Outbox` class. The `records`, `deliveries`, `approvals`, and `retention` modules contain
the functions that read or change the state. `lock` allows only one agent per state directory.
"""
