"""`portal` and its commands: their options, and what they print. The portal itself is loaded when one of them runs."""

from __future__ import annotations

import logging
import platform
import sys
from pathlib import Path
from typing import Any

import click

from bridge import logs
from bridge.cli.help import add_examples
from bridge.cli.options import FILE, option
from bridge.errors import BridgeError
from bridge.system.extras import how_to_install

_OLDEST = (3, 11)
_FAILED = 1

config = option(
    "--config",
    "-c",
    "path",
    type=click.Path(path_type=Path),
    help="The portal's TOML file.  [default: $SCHEDULED_EVENTS_PORTAL_CONFIG, else "
    "/etc/scheduled-events-portal/portal.toml]",
    show_default=False,
)


def serve(path: Path | None, log_format: str, log_level: str) -> None:
    """Serve the portal until a signal stops it."""
    logs.configure(form=log_format, level=log_level.upper())
    library().serve(path)


@click.command(short_help="Bring the database to this version.")
@config
def migrate(path: Path | None) -> None:
    """Bring the database to this version; `portal` does so too when it starts."""
    before, now = library().migrate(path)
    if before == now:
        click.echo(f"The database is at step {now}, as this version wants it.")
    else:
        click.echo(f"The database was brought from {f'step {before}' if before else 'nothing'} to step {now}.")


@click.command(short_help="Copy the database, also while the portal runs.")
@config
@click.argument("target", type=FILE)
def backup(path: Path | None, target: Path) -> None:
    """Copy the database to the file TARGET, also while the portal runs; never over a file that is there.

    A portal that is started on the copy has agents ask for all decisions again.
    """
    library().backup(path, target)
    click.echo(f"{target} has the database as it was now.")


@click.command(short_help="Say whether the audit is as it was written.")
@click.argument("what", type=click.Choice(["verify"]))
@config
def audit(what: str, path: Path | None) -> int:  # noqa: ARG001  # there is one thing to do so far
    """Look at every entry of the audit; name the first that was changed or taken away, and end with 1."""
    found = library().verify(path)
    if found.fault is not None:
        click.echo(f"Entry {found.fault.entry} of {found.entries} is not as it should be: {found.fault.why}.", err=True)
        return _FAILED
    click.echo(f"All {found.entries} entries are as they were written. The last hash is {found.last_hash or 'none'}.")
    return 0


@click.command(short_help="Print the audit, an entry a line.")
@config
@option("--format", "form", type=click.Choice(["jsonl", "csv"]), default="jsonl")
def export(path: Path | None, form: str) -> None:
    """Print every entry of the audit, oldest first."""
    for line in library().export(path, form):
        click.echo(line)


@click.group(short_help="Say who may look and who may decide.")
def users() -> None:
    """Say who may look at the portal's pages, and who may decide there."""


@users.command("add", short_help="Let somebody in, or change who it is.")
@click.argument("name")
@config
@option("--role", type=click.Choice(["viewer", "approver"]), default="viewer", help="An approver decides too.")
@option("--scope", multiple=True, help="resource_group:NAME or labels.NAME:VALUE, several times; none: all VMs.")
@option("--no-password", is_flag=True, help="Only a proxy lets this person in (`people.proxy_header`).")
def add_user(name: str, path: Path | None, role: str, scope: tuple[str, ...], no_password: bool) -> None:  # noqa: FBT001
    """Let NAME in; the password is asked for, or read from standard input. Whoever has the name already is changed."""
    password = None if no_password else _password()
    library().add_user(path, name, password=password, role=role, scope=scope)
    click.echo(f"{name} is {'an approver' if role == 'approver' else 'a viewer'} now.")


@users.command("list", short_help="List everybody.")
@config
def list_users(path: Path | None) -> None:
    """List everybody who has a name here, one a line: name, role, scope."""
    for user in library().list_users(path):
        click.echo(_line(user))


@users.command("change", short_help="Change what somebody may do.")
@click.argument("name")
@config
@option("--role", type=click.Choice(["viewer", "approver"]), help="An approver decides too.")
@option("--scope", multiple=True, help="resource_group:NAME or labels.NAME:VALUE, several times: these and no others.")
@option("--all-vms", is_flag=True, help="No scope any more: all VMs.")
def change_user(name: str, path: Path | None, role: str | None, scope: tuple[str, ...], all_vms: bool) -> None:  # noqa: FBT001
    """Change the role or the scope of NAME; what is not named stays. Open sessions end at once."""
    if scope and all_vms:
        raise click.UsageError("Give --scope or --all-vms, not both.")
    user = library().change_user(path, name, role=role, scope=scope if scope or all_vms else None)
    click.echo(_line(user))


@users.command("password", short_help="Give somebody another password.")
@click.argument("name")
@config
@option("--no-password", is_flag=True, help="Only a proxy lets this person in (`people.proxy_header`).")
def set_password(name: str, path: Path | None, no_password: bool) -> None:  # noqa: FBT001
    """Give NAME another password, asked for or read from standard input. Open sessions end at once."""
    library().set_password(path, name, None if no_password else _password())
    click.echo(f"{name} has {'no password any more' if no_password else 'another password now'}.")


@users.command("disable", short_help="Let somebody in no more.")
@click.argument("name")
@config
def disable_user(name: str, path: Path | None) -> None:
    """Let NAME in no more; open sessions end at once."""
    library().disable_user(path, name)
    click.echo(f"{name} is let in no more.")


@users.command("enable", short_help="Let somebody in again.")
@click.argument("name")
@config
def enable_user(name: str, path: Path | None) -> None:
    """Let NAME in again who was disabled, with the password, role and scope of before."""
    click.echo(_line(library().enable_user(path, name)))


@users.command("sign-out", short_help="End the sessions of somebody.")
@click.argument("name")
@config
def sign_out_user(name: str, path: Path | None) -> None:
    """End all sessions of NAME at once, who may sign in again: after a lost laptop, say."""
    library().sign_out_user(path, name)
    click.echo(f"The sessions of {name} have ended.")


def _line(user: Any) -> str:
    """Return who *user* is, in a line."""
    ended = "" if user.disabled_at is None else f"  (disabled {user.disabled_at})"
    return f"{user.user_name}  {user.role}  {', '.join(user.scopes) or 'all VMs'}{ended}"


def _password() -> str:
    """Return the password that a person types twice, or that standard input begins with."""
    if sys.stdin.isatty():
        return str(click.prompt("Password", hide_input=True, confirmation_prompt=True))
    return sys.stdin.readline().rstrip("\r\n")


def commands() -> dict[str, click.Command]:
    """Return the commands by their names, with examples."""
    found: dict[str, click.Command] = {
        "migrate": migrate,
        "backup": backup,
        "audit": audit,
        "export": export,
        "users": users,
    }
    for name, command in found.items():
        add_examples(command, f"portal {name}")
    return found


def library() -> Any:
    """Return the module `bridge.portal.command`; raise BridgeError where it cannot run."""
    if sys.version_info[:2] < _OLDEST:
        raise BridgeError(
            f"The portal needs Python 3.11 or newer, and this is {platform.python_version()}; the agent runs on both."
        )
    try:
        logging.getLogger("alembic").setLevel(logging.WARNING)  # its import tells of each of its plug-ins
        from bridge.portal import command  # noqa: PLC0415  # tens of MiB that only the portal needs
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "bridge":
            raise
        raise BridgeError(
            f"The portal is not installed here: there is no module {error.name}. {how_to_install('portal')}."
        ) from error
    return command
