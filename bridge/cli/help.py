"""The help of the command line: groups of commands, the location of the configuration, and examples."""

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

_EPILOG = """\b
Configuration: --config FILE, else $SCHEDULED_EVENTS_BRIDGE_CONFIG, else
  /etc/scheduled-events-bridge/config.toml
  (Windows: %ProgramData%\\scheduled-events-bridge\\config.toml), else defaults.
State: state.directory there, else $STATE_DIRECTORY, else
  /var/lib/scheduled-events-bridge for root and
  ~/.local/state/scheduled-events-bridge for others.
Override the file: $SCHEDULED_EVENTS_BRIDGE_STATUS_LISTEN for status.listen,
  $SCHEDULED_EVENTS_BRIDGE_STATE_DIRECTORY for state.directory.
NO_COLOR turns colors off.
"""

#: At least two for each command. The reference of the commands shows them as well.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "run": ("run", "run --config try.toml --log-level debug"),
    "init": ("init --sink eventhubs --sink webhook:slack", "init --sink webhook:pagerduty --output config.toml"),
    "check-config": ("check-config", "check-config --config try.toml --connect"),
    "schema": ("schema", "schema --config"),
    "send-test": ("send-test", "send-test pagerduty"),
    "status": ("status", "status --json"),
    "events": ("events --since 1h --type Reboot", "events --follow --json"),
    "outbox list": ("outbox list", "outbox list --sink pagerduty --state parked"),
    "outbox retry": ("outbox retry", "outbox retry --sink pagerduty"),
    "outbox discard": ("outbox discard --sink pagerduty", "outbox discard --sink pagerduty --state parked --yes"),
    "outbox move": ("outbox move teams teams-ops", "outbox move old-webhook new-webhook --config try.toml"),
    "outbox import": ("outbox import outbox-7.db", "outbox import /var/tmp/recovered.db"),
    "approve": ("approve C7061BAC-AFDC-4513-B24B-AA5F13A16123", "approve C7061BAC-AFDC-4513-B24B-AA5F13A16123 --yes"),
    "keygen": ("keygen ops.key --approver ops", "keygen --directory /etc/portal --kid portal-2026"),
    "decide": (
        "decide --key ops.key --kid ops --approver ops --event-file events.json --decision approve",
        "decide --key ops.key --kid ops --approver ops --event-file - --decision hold --reason 'month end'",
        "decide --key ops.key --kid ops --approver ops --event-file fleet.jsonl --decision hold --all",
    ),
    "portal migrate": ("portal migrate", "portal migrate --config portal.toml"),
    "portal backup": ("portal backup portal-2026-11-20.db", "portal backup --config portal.toml copy.db"),
    "portal audit": ("portal audit verify", "portal audit verify --config portal.toml"),
    "portal export": ("portal export | head -3", "portal export --format csv"),
    "portal users": (
        "portal users add ann --role approver",
        "portal users change ann --role viewer",
        "portal users sign-out ann",
    ),
    "demo": ("demo", "demo | head -1", "demo --portal"),
    "portal-check": (
        "portal-check https://ops.example.net/api/v1 --vm-id 7ef1d8a4-0c2b-4c7e-9a35-1f5f6d1f2b90 --token-file token",
        "portal-check http://127.0.0.1:8080/api/v1 --vm-id 7ef1d8a4-0c2b-4c7e-9a35-1f5f6d1f2b90 --json",
    ),
    "simulate": ("simulate live-migration --speed 60", "simulate preempt --vm vm-0 --vm vm-1 --first-call 20"),
}


class GroupedCommands(click.Group):
    """The top level, whose help lists the commands in groups."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Add the location of the configuration below the commands."""
        super().__init__(*args, epilog=_EPILOG, **kwargs)

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
