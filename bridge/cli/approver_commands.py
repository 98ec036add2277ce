"""The commands for approvers and portals, with their options and help: `keygen`, `decide`, `portal`, `portal-check`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import click

from bridge.cli.help import LaterCommands
from bridge.cli.options import DIRECTORY, FILE, option
from bridge.exit_codes import ExitCode


@click.command(short_help="Make a pair of keys to sign decisions with.")
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


@click.command("portal-check", short_help="Say what of the protocol a portal does not meet.")
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


@click.command(short_help="Sign a decision on an event, and print it.")
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


@click.group(
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


APPROVER_COMMANDS: tuple[click.Command, ...] = (keygen, portal_check, decide, portal)
