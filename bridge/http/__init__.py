"""HTTP with a wall-clock deadline: requests' session, a plain connection, and the watchdog that cuts overdue calls.

Public: `session` (DeadlineSession, ResponseUnread and its kinds), `connection` (DeadlineConnection), `retry_after`
(retry_after_seconds), `failures` (causes, root_cause, is_loopback, are_loopback_hosts), `tls_files`
(tls_file_problems), `lean_requests` (import_requests).
"""
