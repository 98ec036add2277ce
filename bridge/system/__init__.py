"""Access to the operating system, and to secrets and tokens.

Public: `run_and_kill` (Runner), `secrets` (Secret, ChangingFile), `access_tokens` (RenewedToken, AttestedToken),
`scopes` (check_scope), `threads` (run_daemon, LoopWatch), `systemd` (SystemdNotifier), `boot` (boot_id),
`ephemeral_disk` (warn_if_ephemeral), `permissions` (why_writable), `extras` (how_to_install).
"""
