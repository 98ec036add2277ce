"""The operating system: programs, secrets, threads, systemd, boot identity, and disks that do not last.

Public: `process` (Runner), `secrets` (Secret), `systemd` (SystemdNotifier), `boot` (boot_id), `threads`
(run_daemon, LoopWatch), `ephemeral_disk` (why_ephemeral).
"""
