"""The operating system: programs, secrets, tokens, threads, systemd, boot identity, and disks that do not last.

Public: `process` (Runner), `secrets` (Secret, ChangingFile), `entra` (EntraToken), `threads` (run_daemon, LoopWatch),
`systemd` (SystemdNotifier), `boot` (boot_id, seconds_since_boot), `ephemeral_disk` (EphemeralDiskWatch).
"""
