"""Defines the options and the help texts of all commands except `portal`.

Commands print results to standard output and messages to standard error. To keep `--help` fast, the code that
implements a command is imported only when the command runs.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

import click

from bridge.cli.help import EPILOG, GroupedCommands, add_examples
from bridge.cli.options import (
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
    """Return the exit code after a failed write. A closed pipe is not a failure."""
    if sys.stdout is not None:
        # The interpreter would fail again when it flushes the buffer at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return 0
    return complain(f"Failed: {error.strerror or error}.", code=ExitCode.FAILED)


@click.group(cls=GroupedCommands, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name=_NAME, prog_name=_NAME)
def commands() -> None:
    """Forward Azure scheduled events to Event Hubs, webhooks, OTLP, and other sinks."""


@commands.command(short_help="Run the agent.")
@with_config
@log_options
@option("--allow-second-agent", is_flag=True, help="Start even if another agent already watches this VM.")
@runs("run.run_agent")
def run() -> None:
    """Run the agent, which watches the events of this VM and sends records to the sinks.

    SIGTERM and SIGINT stop the agent. SIGHUP reloads the configuration.

    The agent's first request turns on Scheduled Events for the VM. If you then reboot or redeploy the VM through Azure,
    Azure can wait up to 15 minutes for an approval.

    The command exits with code 73 if another agent on this machine is already watching the VM.
    """


@commands.command(short_help="Show a live migration, on a simulated VM.")
@option("--portal", "with_portal", is_flag=True, help="Start a portal, and decide on events in a browser.")
@runs("demo.demo")
def demo() -> None:
    """Show the records of a live migration on a simulated VM. The demo needs no configuration.

    With --portal, the demo starts three agents and a portal, where you decide on events in a browser. Press Ctrl-C to
    stop the demo.
    """


@commands.command("check-config", short_help="Check the configuration.")
@config
@option("--connect", is_flag=True, help="Also try IMDS, the portal, and every destination, without writing to them.")
@runs("check_config.report.check_configuration")
def check_config() -> None:
    """Check the configuration, and report all errors at once.

    The exit code is 78 if the configuration is invalid. It is 1 if a secret, a program, or the state directory cannot
    be used, if another user can change a file that controls approvals, or if --connect finds a destination that fails.

    The command does not run in the service's sandbox. For example, it might be able to write to a directory that is
    read-only for the service.

    Requesting the Scheduled Events document for the first time turns on Scheduled Events for the VM. To avoid
    this, --connect requests the document only if an agent already uses the state directory.
    """


@commands.command(short_help="Show the agent's state.")
@config
@state_directory
@option("--json", "as_json", is_flag=True, help="Print one JSON object on one line.")
@runs("status.show_status")
def status() -> None:
    """Show the agent's state, the scheduled events, and the undelivered records.

    When an event disappears from Azure's document, it stays in the list until five polls have confirmed its ending.

    If no agent is running, the command shows the last saved state. The exit code is 1 if the agent does not respond
    within 5 seconds, or if no state has been saved. To check whether the agent is healthy, use `/readyz`.
    """


@commands.command(short_help="List the transition records of this VM.")
@with_state
@option("--limit", "-n", type=click.IntRange(min=1), default=50, help="The maximum number of records.")
@option("--follow", "-f", is_flag=True, help="Print new records until you press Ctrl-C.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@option("--since", help="Only records since this time: 90s, 30m, 1h, 2d, or 2026-11-20T11:00Z.")
@option("--event-id", help="Only records of this event.")
@option("--type", "event_types", multiple=True, help="Only events of this type, such as Reboot. Can be repeated.")
@runs("events.list_events")
def events() -> None:
    """List the transition records of this VM, oldest first."""


@commands.command(short_help="Approve an event, which Azure may then start at once.")
@with_config
@click.argument("event_id")
@option("--yes", is_flag=True, help="Do not ask for confirmation.")
@option("--overrule", is_flag=True, help="With --yes: approve even if a hold exists or more approvers are required.")
@runs("approve.approve")
def approve() -> None:
    """Approve the event EVENT_ID for all affected VMs. Azure can then start it immediately.

    The running agent sends the approval to Azure. The exit code is 1 if no agent is running, or if the event is not
    approved within 30 seconds. If the agent cannot send the approval immediately, it keeps trying even after the
    command ends. To prevent this, create the file `approvals.disabled` in the state directory.
    """


@commands.command("send-test", short_help="Send a test record directly to the sinks.")
@with_config
@click.argument("names", metavar="[SINK]...", nargs=-1)
@runs("send_test.send_test")
def send_test() -> None:
    """Send a test record to each SINK, or to all configured sinks.

    The record does not go through the outbox. Sinks that start a program are tested only if you name them.
    """


@commands.group(short_help="List, retry, discard, move, or import undelivered records.")
def outbox() -> None:
    """Manage undelivered records. These commands also work while no agent is running."""


_sink = option("--sink", help="Only records of this sink, even if it is no longer configured.")
_record = option("--id", "record_id", help="Only the record with this ID.")
_state = option("--state", type=click.Choice(["pending", "parked"]), help="Only this state.  [default: both]")


@outbox.command("list")
@with_state
@_sink
@_state
@option("--limit", "-n", type=click.IntRange(min=1), default=100, help="The maximum number of records.")
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
    """Make parked records pending, and send all pending records at once."""


@outbox.command()
@with_state
@option("--sink", required=True, help="Name of the sink, even if it is no longer configured.")
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
    """Move undelivered records from the sink OLD to the sink NEW, for example after a rename.

    OLD's metrics count the moved records as discarded. If NEW has already received a record in the last 7 days
    (state.keep_delivered_seconds), the agent does not send it to NEW again.
    """


@outbox.command("import")
@with_state
@click.argument("file", type=FILE)
@runs("outbox.import_file")
def import_() -> None:
    """Import undelivered records and holds from another outbox FILE.

    FILE can be the output of `sqlite3 .recover`. The command skips records that are already in the outbox. The agent's
    user must be able to read FILE.
    """


@commands.command(short_help="Simulate IMDS with a scenario.")
@click.argument("scenario", default="live-migration")
@option("--list", "list_scenarios", is_flag=True, help="List the included scenarios, and exit.")
@option("--listen", default="127.0.0.1:8169", help="Address of the first VM. Other VMs get the next ports.")
@option("--vm", "vms", multiple=True, default=("simulated-vm",), help="Name of a VM. Repeat the option for a fleet.")
@option(
    "--speed", type=click.FloatRange(min=0, min_open=True), default=1.0, help="At 60, a scenario runs 60 times as fast."
)
@option("--rate-limit/--no-rate-limit", default=True, help="Limit clients to 5 requests per second, as Azure does.")
@option("--first-call", "first_call_seconds", type=click.FloatRange(0), default=0, help="Delay of the first response.")
@option("--allow-remote", is_flag=True, help="Allow an address that is not loopback.")
def simulate(*, list_scenarios: bool, **options: Any) -> None:
    """Simulate IMDS and play back SCENARIO, which is a name from --list or a TOML file.

    To add, start, or cancel events, send requests to /control on the same port. See docs/reference/simulator.md.
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
    """Print the JSON schema of a transition record, or of the configuration."""
    import json  # noqa: PLC0415

    from bridge.config.json_schema import configuration_schema  # noqa: PLC0415
    from bridge.events.record import json_schema  # noqa: PLC0415

    click.echo(json.dumps(configuration_schema() if of_config else json_schema(), indent=2))


@commands.command(short_help="Write a first configuration with comments.")
@option(
    "--sink", "sinks", multiple=True, metavar="RECIPE", help="Recipe for a sink. Can be repeated.  [default: stdout]"
)
@option("--output", "-o", type=FILE, help="Create this file.  [default: print the configuration]")
@option("--list", "list_recipes", is_flag=True, help="List the recipes, and exit.")
@runs("init.init")
def init() -> None:
    """Write a commented configuration, which you can adapt.

    Each RECIPE configures one sink, for example webhook:slack.
    """


@commands.command(short_help="Create a key pair for signing decisions.")
@click.argument("private_file", type=FILE)
@option("--kid", help="The ID of the key in decisions.  [default: the name of the file]")
@option("--approver", default="portal", help="The approver who signs with the key.")
@runs("decide.keygen")
def keygen() -> None:
    """Create an Ed25519 key pair for signing decisions.

    The command prints the configuration for VMs that trust the key. The private key is written to PRIVATE_FILE and the
    public key to PRIVATE_FILE.pub. Existing files are never overwritten.
    """


@commands.command("portal-check", short_help="Check a portal against the protocol.")
@click.argument("url")
@option("--vm-id", required=True, type=click.UUID, help="The vmId of a VM that the portal knows, preferably a test VM.")
@option("--token-file", type=FILE, help="The VM's bearer token for the portal.")
@option("--token-env", help="An environment variable with this token.")
@option("--attested", is_flag=True, help="Authenticate with an attested document of this VM instead.")
@option("--imds", default="http://169.254.169.254", help="With --attested: the URL of IMDS.")
@option("--entra-scope", help="Authenticate with an Entra ID token for this scope instead.")
@option("--client-cert-file", type=FILE, help="Authenticate with this client certificate instead.")
@option("--client-key-file", type=FILE, help="The key of the client certificate, if it is in a separate file.")
@option("--ca-file", type=FILE, help="Trusted certificate authorities, instead of the default ones.")
@option("--wait", "wait_seconds", type=click.IntRange(2, 600), default=5, help="Duration of a long poll in seconds.")
@option("--public-key", type=FILE, help="The public key that verifies decisions.")
@option("--kid", help="The ID of the key in decisions.  [default: the name of the file]")
@option("--approver", default="portal", help="The approver who signs with the key.")
@option("--records-url", help="The URL that accepts records. It receives records of a test event.")
@option(
    "--decision-by",
    metavar="COMMAND|person",
    help="Who decides: a program, or `person`.  [default: decisions are not tested]",
)
@option("--decision-seconds", type=click.FloatRange(min=1), default=300.0, help="Time limit for each decision.")
@option("--json", "as_json", is_flag=True, help="Print one requirement per line.")
@runs("portal_check.portal_check")
def portal_check() -> None:
    """Test whether the portal at URL follows PROTOCOL.md.

    Set URL to the value of approval.remote.url in the agents' configuration.

    The command sends the same requests as an agent. The exit code is 1 if the portal does not meet a requirement.

    The program in --decision-by runs twice, first with PORTAL_CHECK_DECISION set to `approve` and then with
    PORTAL_CHECK_DECISION set to `hold`. PORTAL_CHECK_VM_ID and PORTAL_CHECK_EVENT_ID contain the IDs of the VM and the
    event. The event's record is passed on standard input.
    """


@commands.command(short_help="Sign and print a decision.")
@option("--key", required=True, type=FILE, help="The private key from `keygen`.")
@option("--kid", required=True, help="The ID of the key in the VM's configuration.")
@option("--approver", required=True, help="The approver of this key in the VM's configuration.")
@option("--vm-id", help="The vmId of the VM.  [default: the VM of the record]")
@option(
    "--event-file",
    required=True,
    type=click.File("rb"),
    help="File with records or an IMDS document, or - for standard input.",
)
@option("--event-id", help="The EventId.  [default: the only event in the file]")
@option("--decision", required=True, type=click.Choice(["approve", "hold"]))
@option("--reason", help="The reason, in one line, for records and logs.")
@option("--valid-seconds", type=float, default=3600.0, help="Seconds until the decision expires, at most one day.")
@option("--all", "for_all", is_flag=True, help="Sign a decision for each VM in the file.")
@runs("decide.print_decisions")
def decide() -> None:
    """Sign a decision on an event, and print the signed token.

    The command does not send the token. Your own portal must return the token to the agent. With --all, the command
    signs a decision for each VM in the file, unless the event has already ended on that VM. It does not sign an
    approval for a VM on which the event has already started.
    """


commands.add_command(portal)
add_examples(commands)
