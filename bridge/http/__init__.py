"""HTTP with a wall-clock deadline: requests' session, the watchdog that cuts overdue calls, and why a call failed.

Public: `session` (DeadlineSession, ResponseTooLarge, retry_after_seconds), `failures` (root_cause).
"""
