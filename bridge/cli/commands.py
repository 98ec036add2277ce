"""The agent's commands with their options and help. `bridge.cli.approver_commands` has the commands for approvers.

Standard output gets the requested output, and standard error everything else. The work of a command is in the module
with its name, which is imported on use: `run` stays small, and `--help` imports neither requests nor the configuration.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bridge.cli.approver_commands import decide, keygen, portal_check
from bridge.cli.help import GroupedCommands, add_examples
from bridge.cli.options import FILE, config, log_options, option, runs, state_directory, with_config, with_state
from bridge.cli.portal import library, portal
from bridge.cli.stderr import complain
from bridge.errors import BridgeError, ConfigurationError, StateDirectoryError
from bridge.exit_codes import ExitCode

if TYPE_CHECKING:
    from bridge.config.settings import Settings

_NAME = "scheduled-events-bridge"


def main() -> None:
    """Run the command line and exit."""
    try:
        code = commands.main(prog_name=_NAME, standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = ExitCode.INTERRUPTED
    except ConfigurationError as error:
        code = complain(*error.mistakes, code=ExitCode.CONFIGURATION)
    except StateDirectoryError as error:
        code = complain(str(error), code=ExitCode.STATE_DIRECTORY)
    except BridgeError as error:
        code = complain(str(error), code=ExitCode.FAILED)
    except OSError as error:
        code = _end_of_output(error)
    sys.exit(code if isinstance(code, int) else 0)


def _end_of_output(error: OSError) -> int:
    """Return the exit code for an output that failed: 0 if the reader is gone, as in `events | head`."""
    if sys.stdout is not None:
        # The interpreter would fail again when it flushes the buffer at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return 0
    return complain(f"Failed: {error.strerror or error}.", code=ExitCode.FAILED)


@click.group(cls=GroupedCommands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name=_NAME, prog_name=_NAME)
def commands() -> None:
    """Forward Azure scheduled events from this VM to Event Hubs, webhooks, OTLP, and other sinks."""


@commands.command(short_help="Watch this VM's events and deliver them.")
@with_config
@log_options
@option("--allow-second-agent", is_flag=True, help="Start even if another agent already watches this VM.")
def run(settings: Settings, log_format: str, log_level: str, *, allow_second_agent: bool) -> None:
    """Watch this VM's events and deliver them, until SIGTERM or SIGINT. SIGHUP reloads the configuration.

    The first request turns Scheduled Events on for the VM: a reboot or redeploy that you request may then wait up to 15
    minutes for an approval. If another agent on this machine watches the same VM, the command exits with 73, because
    two agents would send every record twice.
    """
    from bridge import logs  # noqa: PLC0415
    from bridge.cli.run import run_agent  # noqa: PLC0415
    from bridge.config.loader import find_config  # noqa: PLC0415

    logs.configure(form=log_format, level=log_level.upper())
    # The file at the start: if it is deleted later, a reload must not use the defaults instead.
    config = find_config(click.get_current_context().params.get("path"), os.environ)
    run_agent(settings, config, allow_second_agent=allow_second_agent)


@commands.command(short_help="Show a live migration, on a simulated VM.")
@option("--portal", "with_portal", is_flag=True, help="Decide on the events of three VMs in the portal, in a browser.")
def demo(*, with_portal: bool) -> None:
    """Show a live migration from announcement to completion, on a simulated VM. It needs no configuration.

    With --portal, three agents wait for your decisions in a browser, until Ctrl-C.
    """
    from bridge.cli.demo import run_demo  # noqa: PLC0415

    if sys.stdout is None:
        raise BridgeError("Standard output is closed. Run the demo with an open standard output.")
    if not with_portal:
        run_demo()
        return
    library()  # reports a missing library
    from bridge.cli.demo_portal import run_portal_demo  # noqa: PLC0415  # the libraries of the portal

    run_portal_demo()


@commands.command("check-config", short_help="Check the configuration.")
@config
@option("--connect", is_flag=True, help="Also try IMDS, the portal, and every destination, without writing to them.")
def check_config(path: Path | None, *, connect: bool) -> int:
    """Check the configuration and report all mistakes at once.

    Exit 78 if `run` would refuse the configuration. Exit 1 if a file, secret, variable, program, or destination that
    the configuration names cannot be used, or if other users can change the files that approvals depend on. Scheduled
    Events are requested only if an agent is running, because the first request turns them on.
    """
    from bridge.cli.check_config.report import check_configuration  # noqa: PLC0415

    return ExitCode.OK if check_configuration(path, connect=connect) else ExitCode.FAILED


@commands.command(short_help="Show the agent's state.")
@config
@state_directory
@option("--json", "as_json", is_flag=True, help="Print one JSON object on one line.")
@runs("status.show_status")
def status() -> None:
    """Show the agent's state: events, sinks, and undelivered records. It also works while the agent is stopped.

    Exit 0 for every state, because /readyz reports health. Exit 1 if an agent runs but does not respond within 5 s, or
    if no outbox can be read.
    """


@commands.command(short_help="List the transition records of this VM.")
@with_state
@option("--limit", "-n", type=click.IntRange(min=1), default=50, help="The number of newest records.")
@option("--follow", "-f", is_flag=True, help="Also print new records until interrupted.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@option("--since", help="Only records from then on: 90s, 30m, 1h, 2d, or a time such as 2026-11-20T11:00Z.")
@option("--event-id", help="Only records of this event.")
@option("--type", "event_types", multiple=True, help="Only events of this type, such as Reboot. Can be repeated.")
@runs("events.list_events")
def events() -> None:
    """List the transition records of this VM, oldest first."""


@commands.command(short_help="Approve an event: Azure may start it at once.")
@with_config
@click.argument("event_id")
@option("--yes", is_flag=True, help="Do not ask for confirmation.")
@option("--overrule", is_flag=True, help="With --yes: end holds, and replace other required approvers.")
@runs("approve.approve")
def approve() -> None:
    """Approve EVENT_ID for all of its VMs. Azure may then start the event at once.

    The running agent posts the approval. Exit 1 if no agent is running, or if the event was not approved within 30 s.
    """


@commands.command("send-test", short_help="Send a test record directly to the sinks.")
@with_config
@click.argument("names", metavar="[SINK]...", nargs=-1)
@runs("send_test.send_test")
def send_test() -> None:
    """Send a record with transition `test` directly to each sink, or to the named sinks."""


@commands.group(short_help="List, retry, discard, move, or import undelivered records.")
def outbox() -> None:
    """List, retry, discard, move, or import undelivered records. It also works while the agent is stopped."""


_sink = option("--sink", help="Only this sink. It may be a sink that is no longer configured.")
_record = option("--id", "record_id", help="Only the record with this ID.")
_state = option("--state", type=click.Choice(["pending", "parked"]), help="Only these.  [default: both]")


@outbox.command("list")
@with_state
@_sink
@_state
@option("--limit", "-n", type=click.IntRange(min=1), default=100, help="The largest number of records.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@runs("outbox.list_records")
def list_() -> None:
    """List the undelivered records of each sink, oldest first, with the last error."""


@outbox.command()
@with_state
@_sink
@_record
@runs("outbox.retry")
def retry() -> None:
    """Send parked records again, and resume paused sinks at once."""


@outbox.command()
@with_state
@option("--sink", required=True, help="The sink. It may be a sink that is no longer configured.")
@_record
@_state
@option("--yes", is_flag=True, help="Do not ask for confirmation.")
@runs("outbox.discard")
def discard() -> None:
    """Discard undelivered records. Discarded records are never sent."""


@outbox.command()
@with_state
@click.argument("old")
@click.argument("new")
@runs("outbox.move")
def move() -> None:
    """Move undelivered records from the sink OLD to the sink NEW, for example after you renamed a sink.

    The records count as discarded on OLD. Records that NEW already received are not sent again.
    """


@outbox.command("import")
@with_state
@click.argument("file", type=FILE)
@runs("outbox.import_file")
def import_() -> None:
    """Add the undelivered records and holds of another outbox FILE, such as the output of `sqlite3 .recover`.

    Records that the outbox already contains are skipped. The agent's user must be able to read FILE.
    """


@commands.command(short_help="Play a scenario as a simulated IMDS.")
@click.argument("scenario", default="live-migration")
@option("--list", "list_scenarios", is_flag=True, help="List the included scenarios, and exit.")
@option("--listen", default="127.0.0.1:8169", help="Address of the first VM. Each other VM gets the next port.")
@option("--vm", "vms", multiple=True, default=("simulated-vm",), help="Name of a VM. Repeat the option for a fleet.")
@option("--speed", type=click.FloatRange(min=0, min_open=True), default=1.0, help="60: one minute takes one second.")
@option("--rate-limit/--no-rate-limit", default=True, help="Answer 429 above five requests per second, as Azure does.")
@option(
    "--first-call",
    "first_call_seconds",
    type=click.FloatRange(min=0),
    default=0.0,
    help="Seconds of the first request.",
)
@option("--allow-remote", is_flag=True, help="Listen on an address that is not loopback.")
def simulate(*, list_scenarios: bool, **options: Any) -> None:
    """Play SCENARIO, a name or a TOML file, as a simulated IMDS for an agent.

    /control on the same port adds, starts, and cancels events. docs/reference/simulator.md lists its routes.
    """
    from bridge.cli.signals import set_by_signals  # noqa: PLC0415
    from bridge.cli.terminal import wrapped  # noqa: PLC0415
    from bridge.testing.simulator.scenario import load_scenario, scenario_names  # noqa: PLC0415
    from bridge.testing.simulator.serving import serve  # noqa: PLC0415

    if list_scenarios:
        for name in scenario_names():
            for line in wrapped(load_scenario(name).description, first=f"{name:<24} ", indent=" " * 25):
                click.echo(line)
        return
    serve(**options, stop=set_by_signals(), say=partial(click.echo, err=True))


@commands.command(short_help="Print the JSON schema of a record or the configuration.")
@option("--config", "of_config", is_flag=True, help="Print the schema of the configuration instead.")
def schema(*, of_config: bool) -> None:
    """Print the JSON schema of a transition record or of the configuration."""
    import json  # noqa: PLC0415

    from bridge.config.json_schema import configuration_schema  # noqa: PLC0415
    from bridge.events.record import json_schema  # noqa: PLC0415

    click.echo(json.dumps(configuration_schema() if of_config else json_schema(), indent=2))


@commands.command(short_help="Write a first configuration with comments.")
@option(
    "--sink",
    "sinks",
    multiple=True,
    metavar="RECIPE",
    help="Repeat it for several sinks. [default: stdout]",
)
@option("--output", "-o", type=FILE, help="Create this file.  [default: print the configuration]")
@option("--list", "list_recipes", is_flag=True, help="List the recipes, and exit.")
def init(sinks: tuple[str, ...], output: Path | None, *, list_recipes: bool) -> None:
    """Write a first configuration with comments and the given sinks, such as eventhubs and webhook:slack."""
    from bridge.cli.init import recipe_names, write_configuration  # noqa: PLC0415

    if list_recipes:
        click.echo("\n".join(recipe_names()))
        return
    write_configuration(sinks or ("stdout",), output)


for each in (keygen, decide, portal, portal_check):
    commands.add_command(each)
add_examples(commands)
