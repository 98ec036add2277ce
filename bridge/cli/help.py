"""The help of the command line: commands grouped by what a person wants, where the configuration is, and examples."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from itertools import chain
from typing import Any

import click

_GROUPS = {
    "Run": ("run", "init", "check-config", "explain", "schema", "send-test"),
    "Look": ("status", "events", "outbox"),
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
Before the file: $SCHEDULED_EVENTS_BRIDGE_STATUS_LISTEN for status.listen,
  $SCHEDULED_EVENTS_BRIDGE_STATE_DIRECTORY for state.directory.
NO_COLOR turns colours off.
"""

#: Two or more of each command; a test runs or reads every one of them.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "run": ("run", "run --config try.toml --log-level debug"),
    "init": ("init --sink eventhubs --sink webhook:slack", "init --sink webhook:pagerduty --output config.toml"),
    "check-config": ("check-config", "check-config --config try.toml --connect"),
    "explain": ("explain sinks.webhook.url", "explain approval.rules"),
    "schema": ("schema", "schema --config"),
    "send-test": ("send-test", "send-test pagerduty"),
    "status": ("status", "status --watch --interval 5"),
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
    """A group that lists its commands by what they are for, and shows examples under each."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make the group with the places of the configuration below its commands."""
        super().__init__(*args, epilog=_EPILOG, **kwargs)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups, in the order in which a person comes to them."""
        listed = set(chain.from_iterable(_GROUPS.values()))
        width = max(map(len, self.list_commands(ctx)))
        others = tuple(name for name in self.list_commands(ctx) if name not in listed)
        for title, names in {**_GROUPS, "Other": others}.items():
            found = [(name, self.get_command(ctx, name)) for name in names]
            rows = [
                (name.ljust(width), command.get_short_help_str(60)) for name, command in found if command is not None
            ]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows, col_max=16)

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Add *cmd* with its examples."""
        super().add_command(cmd, name)
        add_examples(cmd, cmd.name or "")


class WithExamples(click.Group):
    """A group whose commands show examples; its own name is before theirs."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Add *cmd* with its examples."""
        super().add_command(cmd, name)
        add_examples(cmd, f"{self.name} {cmd.name}")


class LaterCommands(click.Group):
    """A group whose commands are made when somebody asks for one of them: the agent does not pay for them."""

    def __init__(self, *args: Any, load: Callable[[], dict[str, click.Command]], **kwargs: Any) -> None:
        """Make the group; *load* returns its commands."""
        self._load = load
        self._loaded: MutableMapping[str, click.Command] | None = None
        super().__init__(*args, **kwargs)

    @property
    def commands(self) -> MutableMapping[str, click.Command]:
        """Return the commands by their names."""
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded

    @commands.setter
    def commands(self, _none: MutableMapping[str, click.Command]) -> None:
        """Take nothing: click sets what there is at first, which is nothing."""


def add_examples(command: click.Command, path: str) -> None:
    """Show the examples of the command at *path*, such as ``outbox list``, below its help."""
    lines = [f"  scheduled-events-bridge {line}" for line in EXAMPLES.get(path, ())]
    if lines:
        command.epilog = "\n".join(["\b", "Examples:", *lines])
