"""Every command with its options and help, and the exit codes of all of them.

What was asked for goes to standard output, everything else to standard error. What a command does stands in the module
of its name beside this one, imported when it is called: `run` stays small in memory.
"""

from __future__ import annotations

import bridge.cli.lean_requests  # isort: skip  # noqa: F401  # before anything imports requests

import os
import sys
import threading
from enum import IntEnum
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import click

from bridge import logs
from bridge.cli.help import GroupedCommands, LaterCommands, WithExamples
from bridge.cli.options import DIRECTORY, FILE, config, option, state_directory, with_config, with_state
from bridge.cli.stderr import complain, complain_of_mistakes, complain_of_usage
from bridge.config.loader import Settings, find_config, load
from bridge.config.loader import state_directory as directory_of
from bridge.errors import BridgeError, ConfigurationError, StateDirectoryError

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


def main() -> None:
    """Run the command line and exit."""
    try:
        code = commands.main(prog_name=_NAME, standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except click.ClickException as error:
        code = complain_of_usage(error)
    except (click.Abort, KeyboardInterrupt):
        code = ExitCode.INTERRUPTED
    except ConfigurationError as error:
        code = complain_of_mistakes(error, code=ExitCode.CONFIGURATION)
    except StateDirectoryError as error:
        code = complain(str(error), code=ExitCode.STATE_DIRECTORY)
    except BridgeError as error:
        code = complain(str(error), code=ExitCode.FAILED)
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
    return complain(f"Failed: {error.strerror or error}.", code=ExitCode.FAILED)


@click.group(cls=GroupedCommands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version(_NAME), prog_name=_NAME)
def commands() -> None:
    """Carry Azure's maintenance notices for this VM to where they are needed."""


@commands.command(short_help="Watch this VM's events and deliver them.")
@with_config
@option(
    "--log-format",
    type=click.Choice(["auto", "json", "text", "journal"]),
    default="auto",
    help="auto: text on a terminal, journal under systemd.",
)
@option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info")
@option("--beside-another", is_flag=True, help="Also where another agent watches this VM already.")
def run(settings: Settings, log_format: str, log_level: str, *, beside_another: bool) -> None:
    """Watch this VM's events and deliver them, until SIGTERM or SIGINT. SIGHUP reads the configuration again.

    Its first request turns Scheduled Events on for the VM: a reboot or redeploy that you ask for may then wait up to 15
    minutes to be approved. Exit 73 where another agent of this machine watches the same VM: two would tell of every
    event twice.
    """
    from bridge.cli.run import run_agent  # noqa: PLC0415

    logs.configure(form=log_format, level=log_level.upper())
    # The file it was started with, so that one which is deleted does not read as "no configuration, so the defaults".
    config = find_config(click.get_current_context().params.get("path"), os.environ)
    run_agent(settings, config, beside_another=beside_another)


@commands.command(short_help="Show a live migration, on a simulated VM.")
@option("--portal", "with_portal", is_flag=True, help="Decide in the ops portal, with three VMs, in a browser.")
def demo(*, with_portal: bool) -> None:
    """Show a live migration from announcement to completion, on a simulated VM; nothing to set up.

    With --portal three agents wait for what you decide in a browser, until Ctrl-C.
    """
    from bridge.cli.demo import run_demo  # noqa: PLC0415

    if sys.stdout is None:
        raise BridgeError("Standard output is closed: the demo has nowhere to show anything.")
    if not with_portal:
        run_demo()
        return
    from bridge.cli.portal import library  # noqa: PLC0415

    library()  # says which of the portal's libraries is missing
    from bridge.cli.demo_portal import run_portal_demo  # noqa: PLC0415  # the libraries of the portal

    run_portal_demo()


@commands.command("check-config", short_help="Say whether the configuration is right.")
@config
@option("--connect", is_flag=True, help="Also try IMDS, the portal and every destination, without writing to it.")
def check_config(path: Path | None, *, connect: bool) -> int:
    """Say whether the configuration is right, with every mistake at once.

    Exit 78 for what `run` refuses too, such as a certificate that is not there; 1 when a public key, a secret, a
    variable, a program or a destination that it names is not as it must be, or others may write to what decides who may
    approve. Scheduled Events themselves are asked for only beside a running
    agent: a first request turns them on.
    """
    from bridge.cli.check import check_settings  # noqa: PLC0415
    from bridge.cli.check_refused import whole_error  # noqa: PLC0415

    file = find_config(path, os.environ)
    try:
        settings = load(file, os.environ)
    except ConfigurationError as error:
        raise whole_error(error, file, connect=connect) from error
    is_right = check_settings(settings, directory_of(settings, os.environ), connect=connect)
    return 0 if is_right else ExitCode.FAILED


@commands.command(short_help="Show the agent's state.")
@config
@state_directory
@option("--json", "as_json", is_flag=True, help="Print one JSON object on one line.")
@option("--watch", "-w", is_flag=True, help="Update the screen until interrupted.")
@option("--interval", type=click.FloatRange(min=0.2), default=2.0, help="With --watch: seconds between updates.")
def status(path: Path | None, state_directory: Path | None, *, as_json: bool, watch: bool, interval: float) -> None:
    """Show the agent's state: events, sinks, and undelivered records. It also works while the agent is stopped.

    Exit 0 for every state, because /readyz reports health. Exit 1 if an agent runs but does not respond within 5 s, or
    if no outbox can be read.
    """
    from bridge.cli.status import show_status, watch_status  # noqa: PLC0415

    if watch and as_json:
        raise click.UsageError("--watch and --json exclude each other.")
    if watch:
        watch_status(path, state_directory, seconds=interval)
    show_status(path, state_directory, as_json=as_json)


@commands.command(short_help="List the transition records of this VM.")
@with_state
@option("--limit", "-n", type=click.IntRange(min=1), default=50, help="The number of newest records.")
@option("--follow", "-f", is_flag=True, help="Also print new records until interrupted.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@option("--since", help="Only records from then on: 90s, 30m, 1h, 2d, or a time such as 2026-11-20T11:00Z.")
@option("--event-id", help="Only records of this event.")
@option("--type", "event_types", multiple=True, help="Only events of this type, such as Reboot. Can be repeated.")
def events(
    directory: Path,
    *,
    limit: int,
    since: str | None,
    event_id: str | None,
    event_types: tuple[str, ...],
    follow: bool,
    as_json: bool,
) -> None:
    """List the transition records of this VM, oldest first."""
    from bridge.agent.requests import Events  # noqa: PLC0415
    from bridge.cli.events import list_events  # noqa: PLC0415
    from bridge.cli.events import since as moment  # noqa: PLC0415
    from bridge.clock import utc_now  # noqa: PLC0415
    from bridge.events.event import check_event_type  # noqa: PLC0415

    try:
        begin = moment(since, utc_now()).timestamp() if since else None
        for each in event_types:
            check_event_type(each)
    except ValueError as error:
        raise click.UsageError(f"--since or --type is not {error}." if event_types else str(error)) from None
    wanted = Events(limit=limit, since=begin, event_id=event_id, event_types=event_types)
    list_events(directory, wanted, follow=follow, as_json=as_json)


@commands.command(short_help="Approve an event: Azure may start it at once.")
@with_config
@click.argument("event_id")
@option("--yes", is_flag=True, help="Do not ask for confirmation.")
@option("--overrule", is_flag=True, help="With --yes: end holds, and replace other required approvers.")
def approve(settings: Settings, event_id: str, *, yes: bool, overrule: bool) -> int:
    """Approve EVENT_ID for all of its VMs. Azure may then start the event at once.

    The running agent posts the approval. Exit 1 if no agent is running, or if the event was not approved within 30 s.
    """
    from bridge.cli.approve import approve as approve_event  # noqa: PLC0415
    from bridge.config.loader import state_directory as directory_of  # noqa: PLC0415

    return approve_event(settings, directory_of(settings, os.environ), event_id, yes=yes, overrule=overrule)


@commands.command("send-test", short_help="Send a test record straight to the sinks.")
@with_config
@click.argument("names", metavar="[SINK]...", nargs=-1)
def send_test(settings: Settings, names: tuple[str, ...]) -> int:
    """Send a record of transition `test` straight to each sink, or to those named."""
    from bridge.cli.send_test import send_test as send  # noqa: PLC0415

    return 0 if send(settings, names) else ExitCode.FAILED


@commands.group(cls=WithExamples, short_help="List, retry, discard, move, or import undelivered records.")
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
def list_(directory: Path, sink: str | None, state: str | None, limit: int, *, as_json: bool) -> None:
    """List the undelivered records of each sink, oldest first, with the last error."""
    from bridge.cli.outbox import list_records  # noqa: PLC0415

    list_records(directory, sink=sink, state=state, limit=limit, as_json=as_json)


@outbox.command()
@with_state
@_sink
@_record
def retry(directory: Path, sink: str | None, record_id: str | None) -> None:
    """Send parked records again, and resume paused sinks at once."""
    from bridge.cli.outbox import retry as retry_records  # noqa: PLC0415

    retry_records(directory, sink=sink, record_id=record_id)


@outbox.command()
@with_state
@option("--sink", required=True, help="The sink. It may be a sink that is no longer configured.")
@_record
@_state
@option("--yes", is_flag=True, help="Do not ask for confirmation.")
def discard(directory: Path, sink: str, record_id: str | None, state: str | None, *, yes: bool) -> None:
    """Discard undelivered records. Discarded records are never sent."""
    from bridge.cli.outbox import discard as discard_records  # noqa: PLC0415

    discard_records(directory, sink=sink, record_id=record_id, state=state, yes=yes)


@outbox.command()
@with_state
@click.argument("old")
@click.argument("new")
def move(directory: Path, old: str, new: str) -> None:
    """Move undelivered records from the sink OLD to the sink NEW, for example after you renamed a sink.

    The records count as discarded on OLD. Records that NEW already received are not sent again.
    """
    from bridge.cli.outbox import move as move_records  # noqa: PLC0415

    move_records(directory, old, new)


@outbox.command("import")
@with_state
@click.argument("file", type=FILE)
def import_(directory: Path, file: Path) -> None:
    """Add the undelivered records and holds of another outbox FILE, such as the output of `sqlite3 .recover`.

    Records that the outbox already contains are skipped. The agent's user must be able to read FILE.
    """
    from bridge.cli.outbox import import_file  # noqa: PLC0415

    import_file(directory, file)


@commands.command(short_help="Play a scenario as a simulated IMDS.")
@click.argument("scenario", default="live-migration")
@option("--list", "list_scenarios", is_flag=True, help="List the scenarios that come with it, and end.")
@option("--listen", default="127.0.0.1:8169", help="Address of the first VM; the others follow port by port.")
@option("--vm", "vms", multiple=True, default=("simulated-vm",), help="A VM's name; repeat it for a fleet.")
@option("--speed", type=click.FloatRange(min=0, min_open=True), default=1.0, help="60: a minute in a second.")
@option("--rate-limit/--no-rate-limit", default=True, help="Answer 429 above five requests a second, as Azure does.")
@option("--first-call", "first_call_seconds", type=click.FloatRange(min=0), default=0.0, help="Seconds of the first.")
@option("--new-id-each-status", is_flag=True, help="A new EventId at each status, as Microsoft's mock server has.")
@option("--until-finished", is_flag=True, help="End when the scenario has.")
@option("--allow-remote", is_flag=True, help="Listen on an address that is not loopback.")
def simulate(*, list_scenarios: bool, **options: Any) -> None:
    """Play SCENARIO, a name or a TOML file, as an IMDS that an agent can be pointed at.

    /control on its port adds, starts and cancels events; docs/reference/simulator.md has its routes.
    """
    from bridge.cli.signals import STOP_SIGNALS, SignalEvents  # noqa: PLC0415
    from bridge.cli.terminal import wrapped  # noqa: PLC0415
    from bridge.testing.simulator.scenario import load_scenario, scenario_names  # noqa: PLC0415
    from bridge.testing.simulator.serving import ServeOptions, serve  # noqa: PLC0415

    if list_scenarios:
        for name in scenario_names():
            for line in wrapped(load_scenario(name).description, first=f"{name:<24} ", indent=" " * 25):
                click.echo(line)
        return
    stop, signals = threading.Event(), SignalEvents()
    for number in STOP_SIGNALS:
        signals.set_on(number, stop)
    serve(ServeOptions(**options), stop=stop, say=partial(click.echo, err=True))


@commands.command(short_help="Print the schema of a record, or of the configuration.")
@option("--config", "of_config", is_flag=True, help="Of the configuration instead.")
def schema(*, of_config: bool) -> None:
    """Print the JSON schema of a transition record, or of the configuration."""
    import json  # noqa: PLC0415

    from bridge.config.json_schema import configuration_schema  # noqa: PLC0415
    from bridge.events.record import json_schema  # noqa: PLC0415

    click.echo(json.dumps(configuration_schema() if of_config else json_schema(), indent=2))


@commands.command(short_help="Write a first configuration, commented.")
@option("--sink", "sinks", multiple=True, metavar="RECIPE", help="Repeat it for several. [default: stdout]")
@option("--output", "-o", type=FILE, help="Make this file.  [default: print it]")
@option("--list", "list_recipes", is_flag=True, help="List the recipes, and end.")
def init(sinks: tuple[str, ...], output: Path | None, *, list_recipes: bool) -> None:
    """Write a first configuration, commented, with the sinks asked for: eventhubs, webhook:slack and so on."""
    from bridge.cli.init import recipe_names, write_configuration  # noqa: PLC0415

    if list_recipes:
        click.echo("\n".join(recipe_names()))
        return
    write_configuration(sinks or ("stdout",), output)


@commands.command(short_help="Say what a key of the configuration means.")
@click.argument("key", required=False)
def explain(key: str | None) -> None:
    """Say what KEY or table of the configuration means, such as sinks.webhook.url; alone, list the tables."""
    from bridge.cli.explain import explain as explain_key  # noqa: PLC0415

    explain_key(key)


@commands.command(short_help="Make a pair of keys to sign decisions with.")
@click.argument("private_file", required=False, type=FILE)
@option("--directory", type=DIRECTORY, help="Where to put the pair, as decisions.key and decisions.key.pub.")
@option("--kid", help="What decisions call the key.  [default: the name of the file]")
@option("--approver", default="portal", help="Who signs with it.")
def keygen(private_file: Path | None, directory: Path | None, kid: str | None, approver: str) -> None:
    """Make a pair of keys (Ed25519) to sign decisions with, and print the lines that make a VM trust it.

    The private key goes to PRIVATE_FILE, the public key beside it with .pub added. No file is ever overwritten.
    """
    from bridge.cli.decide import DEFAULT_KEY_NAME, make_key  # noqa: PLC0415

    if private_file is not None and directory is not None:
        raise click.UsageError("PRIVATE_FILE and --directory both say where the pair goes. Give one of them.")
    click.echo(make_key(private_file or (directory or Path()) / DEFAULT_KEY_NAME, kid=kid, approver=approver))


@commands.command("portal-check", short_help="Say what of the protocol a portal does not meet.")
@click.argument("url")
@option("--vm-id", required=True, help="The vmId of a VM that the portal may know, best one made for tests.")
@option("--token-file", type=FILE, help="The VM's bearer token for the portal.")
@option("--token-env", help="An environment variable with that token.")
@option("--attested", is_flag=True, help="Instead: this machine is the VM, and Azure says so to the portal.")
@option("--imds", default="http://169.254.169.254", help="With --attested: the metadata service.")
@option("--entra-scope", help="Instead: this machine's managed identity asks Entra ID for a token of this scope.")
@option("--client-cert-file", type=FILE, help="Instead: a client certificate.")
@option("--client-key-file", type=FILE, help="Its key, unless it stands in the same file.")
@option("--ca-file", type=FILE, help="The authorities to trust instead of those that come with requests.")
@option("--wait", "wait_seconds", type=click.IntRange(2, 600), default=5, help="Seconds that a request is to be held.")
@option("--public-key", type=FILE, help="The key that decisions are signed with, to check them.")
@option("--kid", help="What decisions call it.  [default: the name of the file]")
@option("--approver", default="portal", help="Who signs with it.")
@option("--records-url", help="Where the portal takes records; it is sent those of an event that does not exist.")
@option("--decision-by", metavar="COMMAND|person", help="Who decides there when asked; otherwise that is not tried.")
@option("--decision-seconds", type=click.FloatRange(min=1), default=300.0, help="How long that may take, each.")
@option("--json", "as_json", is_flag=True, help="One requirement a line.")
def portal_check(  # noqa: PLR0917  # click's
    url: str,
    vm_id: str,
    public_key: Path | None,
    kid: str | None,
    approver: str,
    records_url: str | None,
    decision_by: str | None,
    decision_seconds: float,
    imds: str,
    *,
    attested: bool,
    as_json: bool,
    **remote: Any,
) -> int:
    """Play an agent against the portal at URL, and say section by section what of PROTOCOL.md it does not meet.

    URL is what approval.remote.url would be. A command that decides gets PORTAL_CHECK_DECISION (approve, then hold),
    PORTAL_CHECK_VM_ID and PORTAL_CHECK_EVENT_ID, and the record of the event on standard input. Exit 1 when something
    is not met.
    """
    from bridge.cli.portal_check import portal_check as check  # noqa: PLC0415

    is_met = check(
        remote={
            "url": url,
            **({"credential": "attested"} if attested else {}),
            **{name: value for name, value in remote.items() if value is not None},
        },
        vm_id=vm_id,
        imds=imds,
        key=None if public_key is None else (public_key, kid or public_key.name.split(".")[0], approver),
        records_url=records_url,
        decision_by=decision_by,
        decision_seconds=decision_seconds,
        as_json=as_json,
    )
    return ExitCode.OK if is_met else ExitCode.FAILED


@commands.command(short_help="Sign a decision on an event, and print it.")
@option("--key", required=True, type=FILE, help="The private key, as `keygen` wrote it.")
@option("--kid", required=True, help="What the VM calls the key.")
@option("--approver", required=True, help="Who decides, as the VM has it for this key.")
@option("--vm-id", help="The vmId of the VM it is for.  [default: the VM of the record]")
@option("--event-file", required=True, type=click.File("rb"), help="Records or a Scheduled Events document; -: stdin.")
@option("--event-id", help="The event's EventId.  [default: the only one of the file]")
@option("--decision", required=True, type=click.Choice(["approve", "hold"]))
@option("--reason", help="One line for records and logs.")
@option("--valid-seconds", type=float, default=3600.0, help="How long an agent may accept it; at most a day.")
@option("--all", "for_all", is_flag=True, help="For every VM that the file has records of, a decision a line.")
@option("--to", "url", metavar="URL", help="Also give it to the portal there, which carries what it did not sign.")
@option("--token-file", type=FILE, help="With --to: the bearer token of whoever decides.")
@option("--ca-file", type=FILE, help="With --to: the authorities to trust instead of those that come with requests.")
def decide(
    event_file: BinaryIO,
    vm_id: str | None,
    url: str | None,
    token_file: Path | None,
    ca_file: Path | None,
    *,
    for_all: bool,
    **options: Any,
) -> None:
    """Sign a decision on an event for one VM, and print it: what a portal hands to the VM's agent.

    With --all for every VM: an approval for those that see the event Scheduled, a hold for all of the resource group.
    """
    from bridge.cli.decide import decide as sign  # noqa: PLC0415
    from bridge.cli.decide_all import decide_for_all, send_decisions  # noqa: PLC0415

    if for_all and vm_id is not None:
        raise click.UsageError("--all and --vm-id both say whom it is for. Give one of them.")
    if url is None and (token_file is not None or ca_file is not None):
        raise click.UsageError("--token-file and --ca-file say how to reach the portal of --to, and there is none.")
    content = event_file.read()
    tokens = decide_for_all(content, **options) if for_all else [sign(content, vm_id=vm_id, **options)]
    click.echo("\n".join(tokens))
    if url is not None:
        given = {"token_file": token_file, "ca_file": ca_file}
        send_decisions(tokens, url=url, options={name: value for name, value in given.items() if value is not None})


def _portal_commands() -> dict[str, click.Command]:
    from bridge.cli.portal import commands as of_portal  # noqa: PLC0415

    return of_portal()


@commands.group(
    cls=LaterCommands, load=_portal_commands, invoke_without_command=True, short_help="Serve the reference ops portal."
)
@option("--config", "-c", "path", type=FILE, help="The portal's TOML file.", show_default=False)
@option("--log-format", type=click.Choice(["auto", "json", "text", "journal"]), default="auto")
@option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info")
@click.pass_context
def portal(context: click.Context, path: Path | None, log_format: str, log_level: str) -> None:
    """Serve the reference ops portal until SIGTERM or SIGINT: it takes the records of a fleet and shows its events.

    It is a server of its own, with a configuration of its own: --config, else $SCHEDULED_EVENTS_PORTAL_CONFIG, else
    /etc/scheduled-events-portal/portal.toml.
    """
    from bridge.cli.portal import serve  # noqa: PLC0415

    if context.invoked_subcommand is None:
        serve(path, log_format, log_level)
    elif path is not None:
        raise click.UsageError(f"Write --config behind the command: portal {context.invoked_subcommand} --config FILE.")
