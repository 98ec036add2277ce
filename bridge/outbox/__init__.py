"""Keeps the agent's state in memory, and saves it to a file for the next start.

While the agent runs, the state in memory is authoritative. If a write fails, the saver retries later.

Other packages use the class `outbox.Outbox`. The modules `records`, `deliveries`, `approvals`, and `retention` contain
the functions that read or change the state. `lock` allows only one agent per state directory.
"""
