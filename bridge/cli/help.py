"""Groups the commands in `--help` by topic, and adds examples and file locations."""

from __future__ import annotations

from typing import Any

import click

_GROUPS = {
    "Run": ("run", "init", "check-config", "schema", "send-test"),
    "Inspect": ("status", "events", "outbox"),
    "Approve": ("approve", "keygen", "decide"),
    "Decide for a fleet": ("portal", "portal-check"),
    "Try": ("demo", "simulate"),
}

EPILOG = """\b
Configuration: --config FILE, else $SCHEDULED_EVENTS_BRIDGE_CONFIG, else
  /etc/scheduled-events-bridge/config.toml
  (Windows: %ProgramData%\\scheduled-events-bridge\\config.toml), else defaults.
State directory: the key state.directory, else $STATE_DIRECTORY, else
  /var/lib/scheduled-events-bridge for root and for the service's user, and
  $XDG_STATE_HOME or ~/.local/state for others.
Variables that override keys: $SCHEDULED_EVENTS_BRIDGE_STATUS_LISTEN overrides
  status.listen, and $SCHEDULED_EVENTS_BRIDGE_STATE_DIRECTORY state.directory.
To turn off colors, set NO_COLOR=1.
"""

EXAMPLES: dict[str, tuple[str, ...]] = {
    "init": ("init --sink eventhubs --sink webhook:slack --output config.toml",),
    "events": ("events --since 1h --type Reboot",),
    "outbox discard": ("outbox discard --sink pagerduty --state parked",),
    "outbox move": ("outbox move old-name new-name",),
    "approve": ("approve C7061BAC-AFDC-4513-B24B-AA5F13A16123",),
    "keygen": ("keygen ops.key --approver ops",),
    "decide": (
        "decide --key ops.key --kid ops --approver ops --event-file events.json --decision approve",
        "decide --key ops.key --kid ops --approver ops --event-file fleet.jsonl --decision hold --all",
    ),
    "portal users": ("portal users add ann --role approver",),
    "portal-check": (
        "portal-check https://ops.example.net/api/v1 --vm-id 7ef1d8a4-0c2b-4c7e-9a35-1f5f6d1f2b90 --token-file token",
    ),
    "demo": ("demo | head -1",),
    "simulate": ("simulate preempt --vm vm-0 --vm vm-1 --speed 60",),
}


class GroupedCommands(click.Group):
    """A click group whose help lists the commands by topic."""

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups in the order of `_GROUPS`."""
        width = max(map(len, self.commands))
        for title, names in _GROUPS.items():
            with formatter.section(title):
                rows = [(name.ljust(width), self.commands[name].get_short_help_str(60)) for name in names]
                formatter.write_dl(rows, col_max=16)


def add_examples(group: click.Group) -> None:
    """Add the examples to the help of each command in *group*."""
    for path, lines in EXAMPLES.items():
        command: Any = group
        for name in path.split():
            command = command.commands[name]
        command.epilog = "\n".join(["\b", "Examples:", *(f"  scheduled-events-bridge {line}" for line in lines)])
