"""The commands for approvers and for authors of portals: `keygen`, `decide`, and `portal-check`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import click

from bridge.cli.options import DIRECTORY, FILE, option, runs


@click.command(short_help="Create a key pair for signing decisions.")
@click.argument("private_file", required=False, type=FILE)
@option("--directory", type=DIRECTORY, help="Write decisions.key and decisions.key.pub to this directory.")
@option("--kid", help="The ID of the key in decisions.  [default: the name of the file]")
@option("--approver", default="portal", help="The approver who signs with the key.")
def keygen(private_file: Path | None, directory: Path | None, kid: str | None, approver: str) -> None:
    """Create an Ed25519 key pair for signing decisions, and print the configuration for the VMs that trust the key.

    The private key goes to PRIVATE_FILE, and the public key to PRIVATE_FILE with .pub appended. The command never
    overwrites a file.
    """
    from bridge.cli.decide import DEFAULT_KEY_NAME, make_key  # noqa: PLC0415

    if private_file is not None and directory is not None:
        raise click.UsageError("Use either PRIVATE_FILE or --directory, not both.")
    click.echo(make_key(private_file or (directory or Path()) / DEFAULT_KEY_NAME, kid=kid, approver=approver))


@click.command("portal-check", short_help="Check a portal against the protocol.")
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
@option(
    "--wait",
    "wait_seconds",
    type=click.IntRange(2, 600),
    default=5,
    help="Seconds for which the portal holds requests.",
)
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


@click.command(short_help="Sign and print a decision.")
@option("--key", required=True, type=FILE, help="The private key from `keygen`.")
@option("--kid", required=True, help="The ID of the key in the VM's configuration.")
@option("--approver", required=True, help="The approver of the key in the VM's configuration.")
@option("--vm-id", help="The vmId of the VM.  [default: the VM of the record]")
@option(
    "--event-file",
    required=True,
    type=click.File("rb"),
    help="Records or a Scheduled Events document, or - for stdin.",
)
@option("--event-id", help="The EventId.  [default: the only event of the file]")
@option("--decision", required=True, type=click.Choice(["approve", "hold"]))
@option("--reason", help="A reason of one line for records and logs.")
@option("--valid-seconds", type=float, default=3600.0, help="Seconds for which agents accept it, at most one day.")
@option("--all", "for_all", is_flag=True, help="Sign a decision for every VM in the file, one per line.")
def decide(event_file: BinaryIO, *, vm_id: str | None, for_all: bool, **options: Any) -> None:
    """Sign a decision on an event for one VM, and print the token that a portal passes to the VM's agent.

    With --all, sign for every VM in the file: an approval where the event is Scheduled, a hold where it is not over.
    """
    from bridge.cli.decide import decide as sign  # noqa: PLC0415

    if for_all and vm_id is not None:
        raise click.UsageError("Use either --all or --vm-id, not both.")
    for token in sign(event_file.read(), vm_id=vm_id, for_all=for_all, **options):
        click.echo(token)
