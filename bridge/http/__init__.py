"""HTTP clients with a deadline for every request.

Public: `session` (DeadlineSession, ResponseUnread), `connection` (DeadlineConnection), `retry_after`
(retry_after_seconds), `failures` (causes, root_cause, is_loopback, are_loopback_hosts), `tls_files`
(tls_file_problems), `lean_requests` (import_requests).
"""
