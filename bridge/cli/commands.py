"""Every command with its options and help. The `portal` commands are in `bridge.cli.portal`.

Requested output goes to standard output, and everything else to standard error. The module that does the work of a
command is imported when the command runs, because `--help` must not load requests or the configuration.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

import click

from bridge.cli.help import EPILOG, GroupedCommands, add_examples
from bridge.cli.options import (
    DIRECTORY,
    FILE,
    config,
    log_options,
    option,
    runs,
    state_directory,
    with_config,
    with_state,
)
from bridge.cli.portal import portal
from bridge.cli.terminal import complain, wrapped
from bridge.errors import BridgeError, ConfigurationError, StateDirectoryError
from bridge.exit_codes import ExitCode

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


@click.group(cls=GroupedCommands, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name=_NAME, prog_name=_NAME)
def commands() -> None:
    """Forward Azure scheduled events from this VM to Event Hubs, webhooks, OTLP, and other sinks."""


@commands.command(short_help="Watch this VM's events and deliver them.")
@with_config
@log_options
@option("--allow-second-agent", is_flag=True, help="Start even if another agent already watches this VM.")
@runs("run.run_agent")
def run() -> None:
    """Watch this VM's events and deliver them, until SIGTERM or SIGINT. SIGHUP reloads the configuration.

    The first request turns Scheduled Events on for the VM: a reboot or redeploy that you request may then wait up to 15
    minutes for an approval. If another agent on this machine watches the same VM, the command exits with 73, because
    two agents would send every record twice.
    """


@commands.command(short_help="Show a live migration, on a simulated VM.")
@option("--portal", "with_portal", is_flag=True, help="Decide on the events of three VMs in the portal, in a browser.")
@runs("demo.demo")
def demo() -> None:
    """Show a live migration from announcement to completion, on a simulated VM. It needs no configuration.

    With --portal, three agents wait for your decisions in a browser, until Ctrl-C.
    """


@commands.command("check-config", short_help="Check the configuration.")
@config
@option("--connect", is_flag=True, help="Also try IMDS, the portal, and every destination, without writing to them.")
@runs("check_config.report.check_configuration")
def check_config() -> None:
    """Check the configuration and report all mistakes at once.

    Exit 78 if `run` would refuse the configuration. Exit 1 if a file, secret, variable, program, or destination that
    the configuration names cannot be used, or if other users can change the files that approvals depend on. Scheduled
    Events are requested only if an agent is running, because the first request turns them on.
    """


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
    type=click.FloatRange(0),
    default=0.0,
    help="The delay of the first response, in seconds.",
)
@option("--allow-remote", is_flag=True, help="Listen on an address that is not loopback.")
def simulate(*, list_scenarios: bool, **options: Any) -> None:
    """Play SCENARIO, a name or a TOML file, as a simulated IMDS for an agent.

    /control on the same port adds, starts, and cancels events. docs/reference/simulator.md lists its routes.
    """
    from bridge.cli.signals import set_by_signals  # noqa: PLC0415
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
@option("--sink", "sinks", multiple=True, metavar="RECIPE", help="A sink. Can be repeated.  [default: stdout]")
@option("--output", "-o", type=FILE, help="Create this file.  [default: print the configuration]")
@option("--list", "list_recipes", is_flag=True, help="List the recipes, and exit.")
@runs("init.init")
def init() -> None:
    """Write a first configuration with comments and the given sinks, such as eventhubs and webhook:slack."""


@commands.command(short_help="Create a key pair for signing decisions.")
@click.argument("private_file", required=False, type=FILE)
@option("--directory", type=DIRECTORY, help="Write decisions.key and decisions.key.pub to this directory.")
@option("--kid", help="The ID of the key in decisions.  [default: the name of the file]")
@option("--approver", default="portal", help="The approver who signs with the key.")
@runs("decide.keygen")
def keygen() -> None:
    """Create an Ed25519 key pair for signing decisions, and print the configuration for the VMs that trust the key.

    The private key goes to PRIVATE_FILE, and the public key to PRIVATE_FILE with .pub appended. The command never
    overwrites a file.
    """


@commands.command("portal-check", short_help="Check a portal against the protocol.")
@click.argument("url")
@option("--vm-id", required=True, help="The vmId of a VM that the portal knows, preferably a test VM.")
@option("--token-file", type=FILE, help="The VM's bearer token for the portal.")
@option("--token-env", help="An environment variable with this token.")
@option("--attested", is_flag=True, help="Instead: authenticate as this machine, with an attested document from Azure.")
@option("--imds", default="http://169.254.169.254", help="With --attested: the metadata service.")
@option("--entra-scope", help="Instead: request an Entra ID token with this scope for this machine's managed identity.")
@option("--client-cert-file", type=FILE, help="Instead: a client certificate.")
@option("--client-key-file", type=FILE, help="The key of the certificate, unless the same file contains it.")
@option("--ca-file", type=FILE, help="The certificate authorities to trust instead of those of requests.")
@option("--wait", "wait_seconds", type=click.IntRange(2, 600), default=5, help="Seconds that a long poll may take.")
@option("--public-key", type=FILE, help="The public key that verifies decisions.")
@option("--kid", help="The ID of the key in decisions.  [default: the name of the file]")
@option("--approver", default="portal", help="The approver who signs with the key.")
@option("--records-url", help="The URL that accepts records. It receives records of an event that does not exist.")
@option("--decision-by", metavar="COMMAND|person", help="How to decide in the portal.  [default: not tried]")
@option("--decision-seconds", type=click.FloatRange(min=1), default=300.0, help="Time limit for each decision.")
@option("--json", "as_json", is_flag=True, help="Print one requirement per line.")
@runs("portal_check.portal_check")
def portal_check() -> None:
    """Act as an agent for the portal at URL, and report each requirement of PROTOCOL.md that the portal does not meet.

    URL is the value that you would set as approval.remote.url. The command runs the program of --decision-by twice:
    with PORTAL_CHECK_DECISION=approve, and with hold. The program also gets PORTAL_CHECK_VM_ID, PORTAL_CHECK_EVENT_ID,
    and the record of the event on standard input. Exit 1 if the portal does not meet a requirement.
    """


@commands.command(short_help="Sign and print a decision.")
@option("--key", required=True, type=FILE, help="The private key from `keygen`.")
@option("--kid", required=True, help="The ID of the key in the VM's configuration.")
@option("--approver", required=True, help="The approver of the key in the VM's configuration.")
@option("--vm-id", help="The vmId of the VM.  [default: the VM of the record]")
@option("--event-file", required=True, type=click.File("rb"), help="Records or a document of IMDS, or - for stdin.")
@option("--event-id", help="The EventId.  [default: the only event of the file]")
@option("--decision", required=True, type=click.Choice(["approve", "hold"]))
@option("--reason", help="A reason of one line for records and logs.")
@option("--valid-seconds", type=float, default=3600.0, help="Seconds for which agents accept it, at most one day.")
@option("--all", "for_all", is_flag=True, help="Sign a decision for every VM in the file, one per line.")
@runs("decide.print_decisions")
def decide() -> None:
    """Sign a decision on an event for one VM, and print the token that a portal passes to the VM's agent.

    With --all, sign for every VM in the file: an approval where the event is Scheduled, a hold where it is not over.
    """


commands.add_command(portal)
add_examples(commands)
