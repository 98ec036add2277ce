"""Keeps the agent's state in memory, and saves it to a file for the next start.

While the agent runs, the state in memory is authoritative. Only the saver thread writes the file. If a write fails, the
saver keeps the unsaved rows in memory and retries later.

Other packages use the class `outbox.Outbox`. The modules `records`, `deliveries`, `approvals`, and `retention` contain
the functions that read or change the state. `lock` allows only one agent per state directory.
"""
