"""HTTP with a wall-clock deadline: requests' session, the watchdog that cuts overdue calls, and causes of failed calls.

Public: `session` (DeadlineSession, ResponseUnread and its kinds, retry_after_seconds), `failures`
(causes, root_cause, is_loopback, are_loopback_hosts), `tls_files` (tls_file_problems).
"""
