"""Every command with its options and help, and the exit codes of all of them.

What was asked for goes to standard output, everything else to standard error. What a command does stands in the module
of its name beside this one, imported when it is called: `run` stays small in memory.
"""

from __future__ import annotations

import bridge.cli.lean_requests  # isort: skip  # noqa: F401  # before anything imports requests

import os
import sys
import threading
from collections.abc import Callable
from enum import IntEnum
from functools import partial, wraps
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import click

from bridge import logs
from bridge.config.loader import Settings, find_config, load, state_directory
from bridge.errors import BridgeError, ConfigurationError, StateDirectoryError
from bridge.text import escaped

_NAME = "scheduled-events-bridge"


class ExitCode(IntEnum):
    """What every command ends with; 73 and 78 are those of `sysexits.h`."""

    OK = 0
    FAILED = 1
    WRONG_USAGE = 2
    """click's own."""
    STATE_DIRECTORY = 73
    """It cannot be made, or another `run` holds it."""
    CONFIGURATION = 78
    """It is wrong."""
    INTERRUPTED = 130


_Command = TypeVar("_Command", bound=Callable[..., Any])
_FILE = click.Path(dir_okay=False, path_type=Path)
# readable=False: the message of our own, when it is read, says more.
_DIRECTORY = click.Path(file_okay=False, readable=False, path_type=Path)
_option = partial(click.option, show_default=True)


def _no_directory(_context: click.Context, _parameter: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a directory, which is wrong usage; any other fault of a file is found when it is read."""
    if path is not None and os.path.isdir(path):  # noqa: PTH112  # False, too, where it may not be seen
        raise click.BadParameter(f"{path} is a directory; name the file itself, such as {path / 'config.toml'}.")
    return path


_config = _option(
    "--config",
    "-c",
    "path",
    type=click.Path(path_type=Path),
    callback=_no_directory,
    help="TOML file.  [default: see the README]",
    show_default=False,
)
_state_directory = _option(
    "--state-directory", type=_DIRECTORY, help="Where the outbox is.  [default: what the configuration says]"
)


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
        code = _complain(*error.mistakes, code=ExitCode.CONFIGURATION)
    except StateDirectoryError as error:
        code = _complain(str(error), code=ExitCode.STATE_DIRECTORY)
    except BridgeError as error:
        code = _complain(str(error), code=ExitCode.FAILED)
    except OSError as error:
        code = _end_of_output(error)
    sys.exit(code if isinstance(code, int) else 0)


def _end_of_output(error: OSError) -> int:
    """Return the exit code for an output that takes no more; a reader that went away has seen enough."""
    if sys.stdout is not None:
        # What is left in the buffer is not written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return 0
    return _complain(f"Failed: {error.strerror or error}.", code=ExitCode.FAILED)


def _complain(*sentences: str, code: int) -> int:
    for line in "\n".join(sentences).split("\n"):
        click.echo(escaped(line), err=True)
    return code


def _with_config(command: _Command) -> Any:
    """Give *command* the settings of `--config`, as `settings`."""

    @_config
    @wraps(command)
    def with_settings(path: Path | None, **rest: Any) -> Any:
        return command(settings=load(find_config(path, os.environ)), **rest)

    return with_settings


def _with_state(command: _Command) -> Any:
    """Give *command* the state directory, from its own option or from the configuration."""

    @_config
    @_state_directory
    @wraps(command)
    def with_directory(path: Path | None, state_directory: Path | None, **rest: Any) -> Any:
        return command(directory=state_directory or _directory_of(path), **rest)

    return with_directory


def _directory_of(path: Path | None) -> Path:
    return state_directory(load(find_config(path, os.environ)), os.environ)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version(_NAME), prog_name=_NAME)
def commands() -> None:
    """Carry Azure's maintenance notices for this VM to where they are needed."""


@commands.command(short_help="Watch this VM's events and deliver them.")
@_with_config
@_option("--log-format", type=click.Choice(["auto", "json", "text"]), default="auto", help="auto: text on a terminal.")
@_option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info")
def run(settings: Settings, log_format: str, log_level: str) -> None:
    """Watch this VM's events and deliver them, until SIGTERM or SIGINT. SIGHUP reads the configuration again."""
    from bridge.cli.run import run_agent  # noqa: PLC0415

    logs.configure(json=None if log_format == "auto" else log_format == "json", level=log_level.upper())
    # The file it was started with, so that one which is deleted does not read as "no configuration, so the defaults".
    run_agent(settings, find_config(click.get_current_context().params.get("path"), os.environ))


@commands.command(short_help="Show a live migration, on a simulated VM.")
def demo() -> None:
    """Show a live migration from announcement to completion, on a simulated VM; nothing to set up."""
    from bridge.cli.demo import run_demo  # noqa: PLC0415

    if sys.stdout is None:
        raise BridgeError("Standard output is closed: the demo has nowhere to show anything.")
    run_demo()


@commands.command("check-config", short_help="Say whether the configuration is right.")
@_with_config
@_option("--connect", is_flag=True, help="Also try IMDS, the portal and every destination, without writing to it.")
def check_config(settings: Settings, *, connect: bool) -> int:
    """Say whether the configuration is right, with every mistake at once.

    Exit 78 for what `run` refuses too, such as a certificate that is not there; 1 when a public key, a secret, a
    variable, a program or a destination that it names is not as it must be, or others may write to what decides who may
    approve. Scheduled Events themselves are asked for only beside a running
    agent: a first request turns them on.
    """
    from bridge.cli.check import check_settings  # noqa: PLC0415

    is_right = check_settings(settings, state_directory(settings, os.environ), connect=connect)
    return 0 if is_right else ExitCode.FAILED


@commands.command(short_help="Show what this VM's agent sees and owes.")
@_config
@_state_directory
@_option("--json", "as_json", is_flag=True, help="One object on one line.")
def status(path: Path | None, state_directory: Path | None, *, as_json: bool) -> None:
    """Show what this VM's agent sees and owes, also when it is down.

    Exit 0 whatever it shows: health is what /readyz answers. Exit 1 when there is no outbox, or it cannot be read.
    """
    from bridge.cli.status import show_status  # noqa: PLC0415

    show_status(path, state_directory, as_json=as_json)


@commands.command(short_help="List the transition records of this VM.")
@_with_state
@_option("--limit", "-n", type=click.IntRange(min=1), default=50, help="The newest so many.")
@_option("--follow", "-f", is_flag=True, help="Go on printing new ones until interrupted.")
@_option("--json", "as_json", is_flag=True, help="One record a line.")
def events(directory: Path, limit: int, *, follow: bool, as_json: bool) -> None:
    """List the transition records that this VM's agent wrote, oldest first."""
    from bridge.cli.events import list_events  # noqa: PLC0415

    list_events(directory, limit=limit, follow=follow, as_json=as_json)


@commands.command()
@_with_config
@click.argument("event_id")
@_option("--yes", is_flag=True, help="Do not ask.")
@_option("--overrule", is_flag=True, help="With --yes: also against a hold, or alone where several must approve.")
def approve(settings: Settings, event_id: str, *, yes: bool, overrule: bool) -> int:
    """Approve EVENT_ID for every VM that it names: Azure may start it at once.

    A state directory is not enough for it: whether anything may be approved, and whom to tell, the configuration says.
    """
    from bridge.cli.approve import approve as approve_event  # noqa: PLC0415

    return approve_event(settings, state_directory(settings, os.environ), event_id, yes=yes, overrule=overrule)


@commands.command("send-test", short_help="Send a test record straight to the sinks.")
@_with_config
@click.argument("names", metavar="[SINK]...", nargs=-1)
def send_test(settings: Settings, names: tuple[str, ...]) -> int:
    """Send a record of transition `test` straight to each sink, or to those named."""
    from bridge.cli.send_test import send_test as send  # noqa: PLC0415

    return 0 if send(settings, names) else ExitCode.FAILED


@commands.group(short_help="See and change what is owed to the sinks.")
def outbox() -> None:
    """See and change what is still owed to the sinks."""


_sink = _option("--sink", help="Only this sink; it may be one that is no longer configured.")
_record = _option("--id", "record_id", help="Only the record with this id.")


@outbox.command("list")
@_with_state
@_sink
@_option(
    "--state",
    type=click.Choice(["owed", "pending", "parked", "delivered", "expired", "evicted", "discarded", "all"]),
    default="owed",
    help="owed: pending and parked.",
)
@_option("--limit", "-n", type=click.IntRange(min=1), default=100)
@_option("--json", "as_json", is_flag=True, help="One object a line.")
def list_(directory: Path, sink: str | None, state: str, limit: int, *, as_json: bool) -> None:
    """List what each sink is owed, and why it has not got it."""
    from bridge.cli.outbox import list_deliveries  # noqa: PLC0415

    list_deliveries(directory, sink=sink, state=state, limit=limit, as_json=as_json)


@outbox.command()
@_with_state
@_sink
@_record
def retry(directory: Path, sink: str | None, record_id: str | None) -> None:
    """Have parked records tried again, and a paused sink at once."""
    from bridge.cli.outbox import retry as retry_records  # noqa: PLC0415

    retry_records(directory, sink=sink, record_id=record_id)


@outbox.command()
@_with_state
@_option("--sink", required=True, help="The sink; it may be one that is no longer configured.")
@_record
@_option("--state", type=click.Choice(["pending", "parked"]), help="Only these.  [default: both]")
@_option("--yes", is_flag=True, help="Do not ask.")
def discard(directory: Path, sink: str, record_id: str | None, state: str | None, *, yes: bool) -> None:
    """Give up on records that a sink is owed: they are never sent."""
    from bridge.cli.outbox import discard as discard_records  # noqa: PLC0415

    discard_records(directory, sink=sink, record_id=record_id, state=state, yes=yes)


@commands.command(short_help="Play a scenario as a simulated IMDS.")
@click.argument("scenario", default="live-migration")
@_option("--list", "list_scenarios", is_flag=True, help="List the scenarios that come with it, and end.")
@_option("--listen", default="127.0.0.1:8169", help="Address of the first VM; the others follow port by port.")
@_option("--vm", "vms", multiple=True, default=("simulated-vm",), help="A VM's name; repeat it for a fleet.")
@_option("--speed", type=click.FloatRange(min=0, min_open=True), default=1.0, help="60: a minute in a second.")
@_option("--rate-limit/--no-rate-limit", default=True, help="Answer 429 above five requests a second, as Azure does.")
@_option("--first-call", "first_call_seconds", type=click.FloatRange(min=0), default=0.0, help="Seconds of the first.")
@_option("--new-id-each-status", is_flag=True, help="A new EventId at each status, as Microsoft's mock server has.")
@_option("--until-finished", is_flag=True, help="End when the scenario has.")
@_option("--allow-remote", is_flag=True, help="Listen on an address that is not loopback.")
def simulate(*, list_scenarios: bool, **options: Any) -> None:
    """Play SCENARIO, a name or a TOML file, as an IMDS that an agent can be pointed at.

    /control on its port adds, starts and cancels events; the README has its routes.
    """
    from bridge.cli.signals import STOP_SIGNALS, SignalEvents  # noqa: PLC0415
    from bridge.testing.simulator.scenario import load_scenario, scenario_names  # noqa: PLC0415
    from bridge.testing.simulator.serving import ServeOptions, serve  # noqa: PLC0415

    if list_scenarios:
        for name in scenario_names():
            click.echo(f"{name:<24} {load_scenario(name).description}")
        return
    stop, signals = threading.Event(), SignalEvents()
    for number in STOP_SIGNALS:
        signals.set_on(number, stop)
    serve(ServeOptions(**options), stop=stop, say=partial(click.echo, err=True))


@commands.command()
def schema() -> None:
    """Print the JSON schema of a transition record."""
    import json  # noqa: PLC0415

    from bridge.events.record import json_schema  # noqa: PLC0415

    click.echo(json.dumps(json_schema(), indent=2))


@commands.command()
@click.argument("private_file", required=False, type=_FILE)
@_option("--directory", type=_DIRECTORY, help="Where to put the pair, as decisions.key and decisions.key.pub.")
@_option("--kid", help="What decisions call the key.  [default: the name of the file]")
@_option("--approver", default="portal", help="Who signs with it.")
def keygen(private_file: Path | None, directory: Path | None, kid: str | None, approver: str) -> None:
    """Make a pair of keys (Ed25519) to sign decisions with, and print the lines that make a VM trust it.

    The private key goes to PRIVATE_FILE, the public key beside it with .pub added. No file is ever overwritten.
    """
    from bridge.cli.decide import DEFAULT_KEY_NAME, make_key  # noqa: PLC0415

    if private_file is not None and directory is not None:
        raise click.UsageError("PRIVATE_FILE and --directory both say where the pair goes. Give one of them.")
    click.echo(make_key(private_file or (directory or Path()) / DEFAULT_KEY_NAME, kid=kid, approver=approver))


@commands.command()
@_option("--key", required=True, type=_FILE, help="The private key, as `keygen` wrote it.")
@_option("--kid", required=True, help="What the VM calls the key.")
@_option("--approver", required=True, help="Who decides, as the VM has it for this key.")
@_option("--vm-id", help="The vmId of the VM it is for.  [default: the VM of the record]")
@_option("--event-file", required=True, type=click.File("rb"), help="Records or a Scheduled Events document; -: stdin.")
@_option("--event-id", help="The event's EventId.  [default: the only one of the file]")
@_option("--decision", required=True, type=click.Choice(["approve", "hold"]))
@_option("--reason", help="One line for records and logs.")
@_option("--valid-seconds", type=float, default=3600.0, help="How long an agent may accept it; at most a day.")
def decide(event_file: BinaryIO, **options: Any) -> None:
    """Sign a decision on an event for one VM, and print it: what a portal hands to the VM's agent."""
    from bridge.cli.decide import decide as sign  # noqa: PLC0415

    click.echo(sign(event_file.read(), **options))
