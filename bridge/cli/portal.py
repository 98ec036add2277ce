"""Defines the `portal` command. Each subcommand imports the portal only when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from bridge.cli.options import FILE, log_options, option
from bridge.errors import BridgeError
from bridge.exit_codes import ExitCode

config = option(
    "--config",
    "-c",
    "path",
    type=click.Path(path_type=Path),
    help="The portal's TOML file.  [default: $SCHEDULED_EVENTS_PORTAL_CONFIG, else "
    "/etc/scheduled-events-portal/portal.toml]",
    show_default=False,
)
_scope = option("--scope", multiple=True, help="resource_group:NAME or labels.NAME:VALUE. Can be repeated.")
_ROLES = click.Choice(["viewer", "approver", "operator"])
_no_password = option("--no-password", is_flag=True, help="Only a proxy authenticates (`people.proxy_header`).")


def library() -> Any:
    """Return the `bridge.portal.command` module. Raise an error if a library is missing."""
    if sys.version_info < (3, 11):
        version = ".".join(map(str, sys.version_info[:3]))
        raise BridgeError(f"The portal needs Python 3.11 or newer, but this is Python {version}.")
    import logging  # noqa: PLC0415

    from bridge.system.extras import how_to_install  # noqa: PLC0415

    try:
        logging.getLogger("alembic").setLevel(logging.WARNING)  # logs each of its plug-ins on import
        from bridge.portal import command  # noqa: PLC0415  # tens of MiB that only the portal needs
    except ModuleNotFoundError as error:
        raise BridgeError(
            f"The portal is not installed: the module {error.name} is missing. {how_to_install('portal')}."
        ) from error
    return command


@click.group(invoke_without_command=True, short_help="Serve the reference ops portal.")
@option("--config", "-c", "path", type=FILE, help="The portal's TOML file.", show_default=False)
@log_options
@click.pass_context
def portal(context: click.Context, path: Path | None, log_format: str, log_level: str) -> None:
    """Serve the reference ops portal until SIGTERM or SIGINT.

    The portal receives records from a fleet of VMs, shows the events, and forwards decisions to the agents.

    Set the path of the portal's configuration file with --config or with the variable SCHEDULED_EVENTS_PORTAL_CONFIG.
    The default is /etc/scheduled-events-portal/portal.toml.
    """
    if context.invoked_subcommand is None:
        from bridge import logs  # noqa: PLC0415

        logs.configure(form=log_format, level=log_level.upper())
        library().serve(path)
    elif path is not None:
        raise click.UsageError(
            f"Write --config after the subcommand: portal {context.invoked_subcommand} --config FILE."
        )


@portal.command(name="check-config", short_help="Check the portal's configuration.")
@config
@option("--connect", is_flag=True, help="Also open the database, and request the metadata of the identity provider.")
def check_config(path: Path | None, *, connect: bool) -> int:
    """Check the configuration and the files that it names, and report all errors at once.

    Run the command as the operating system user that runs the portal. The exit code is 78 if the configuration is
    invalid, and 1 if the portal cannot use a file, the database, or the identity provider.
    """
    found, new_database = library().check_config(path, connect=connect)
    for problem in found:
        click.echo(f"Problem: {problem}", err=True)
    if not found:
        click.echo("The configuration is valid.")
    if connect and new_database is not None and not found:
        click.echo(f"The portal creates the database {new_database} when it starts.")
    return ExitCode.FAILED if found else ExitCode.OK


@portal.command(short_help="Migrate the database to this version.")
@config
def migrate(path: Path | None) -> None:
    """Migrate the database to this version. The portal also migrates the database at startup."""
    before, now = library().migrate(path)
    if before == now:
        click.echo(f"The database is already at step {now}.")
    else:
        click.echo(f"The {f'database at step {before}' if before else 'empty database'} was migrated to step {now}.")


@portal.command(short_help="Copy the database.")
@config
@click.argument("target", type=FILE)
def backup(path: Path | None, target: Path) -> None:
    """Copy the database to the new file TARGET. The portal can run during the copy.

    If you start a portal with this copy, every agent requests all of its decisions again.
    """
    library().backup(path, target)
    click.echo(f"The database was copied to {target}.")


@portal.command(short_help="Verify the hash chain of the audit log.")
@click.argument("what", type=click.Choice(["verify"]))
@config
@option("--expect", metavar="HASH", help="A hash from an earlier run. The command fails if no entry has this hash.")
def audit(what: str, path: Path | None, expect: str | None) -> int:  # noqa: ARG001  # `verify` is the only choice
    """Verify every entry in the audit log. Exit with 1 if an entry was changed or removed."""
    found = library().verify(path, expect)
    if found.fault is not None:
        click.echo(f"Entry {found.fault.entry} of {found.entries} is invalid: {found.fault.why}.", err=True)
        return ExitCode.FAILED
    if expect is not None and found.expected_entry is None:
        click.echo("No entry has the expected hash. Entries were removed, or hashes were recalculated.", err=True)
        return ExitCode.FAILED
    if expect is not None:
        click.echo(f"Entry {found.expected_entry} has the expected hash.")
    click.echo(f"All {found.entries} entries are valid. The last hash is {found.last_hash or 'none'}.")
    return ExitCode.OK


@portal.command(short_help="Print the entries of the audit log.")
@config
@option("--format", "form", type=click.Choice(["jsonl", "csv"]), default="jsonl")
def export(path: Path | None, form: str) -> None:
    """Print every entry in the audit log, oldest first."""
    for text in library().export(path, form):
        click.echo(text, nl=False)


@portal.group(short_help="Manage the users of the portal.")
def users() -> None:
    """Manage the portal's users.

    Viewers can see events. Approvers can also approve and hold events. Operators manage users, but cannot decide on
    events.
    """


@users.command("add", short_help="Add or replace a user.")
@click.argument("name")
@config
@option("--role", type=_ROLES, default="viewer", help="Only an approver can decide.")
@_scope
@_no_password
def add_user(name: str, path: Path | None, role: str, scope: tuple[str, ...], *, no_password: bool) -> None:
    """Add or replace the user NAME. Without --scope, the user can see all VMs.

    On a terminal, the command prompts for the password. Otherwise, it reads one line from standard input.
    """
    password = None if no_password else _password()
    library().add_user(path, name, password=password, role=role, scope=scope)
    click.echo(f"{name} is now {'a viewer' if role == 'viewer' else f'an {role}'}.")


@users.command("list", short_help="List all users.")
@config
def list_users(path: Path | None) -> None:
    """List the name, role, and scope of each user, one user per line."""
    for user in library().list_users(path):
        _print_user(user)


@users.command("change", short_help="Change the role or scope of a user.")
@click.argument("name")
@config
@option("--role", type=_ROLES, help="Only an approver can decide.")
@_scope
@option("--all-vms", is_flag=True, help="Remove the scope. The user can then see all VMs.")
def change_user(name: str, path: Path | None, role: str | None, scope: tuple[str, ...], *, all_vms: bool) -> None:
    """Change the role or replace all scopes of the user NAME, and end the user's sessions."""
    if scope and all_vms:
        raise click.UsageError("--scope and --all-vms are mutually exclusive. Use only one of them.")
    _print_user(library().change_user(path, name, role=role, scope=scope if scope or all_vms else None))


@users.command("password", short_help="Change the password of a user.")
@click.argument("name")
@config
@_no_password
def set_password(name: str, path: Path | None, *, no_password: bool) -> None:
    """Change the password of the user NAME, and end the user's sessions.

    On a terminal, the command prompts for the password. Otherwise, it reads one line from standard input.
    """
    library().set_password(path, name, None if no_password else _password())
    click.echo(f"{name} has {'no password' if no_password else 'a new password'}.")


@users.command("disable", short_help="Disable a user.")
@click.argument("name")
@config
def disable_user(name: str, path: Path | None) -> None:
    """Disable the user NAME, and end the user's sessions."""
    library().disable_user(path, name)
    click.echo(f"{name} is disabled.")


@users.command("enable", short_help="Enable a disabled user.")
@click.argument("name")
@config
def enable_user(name: str, path: Path | None) -> None:
    """Enable the disabled user NAME. The password, role, and scope stay the same."""
    _print_user(library().enable_user(path, name))


@users.command("sign-out", short_help="End the sessions of a user.")
@click.argument("name")
@config
def sign_out_user(name: str, path: Path | None) -> None:
    """End all sessions of the user NAME. The user can sign in again."""
    library().sign_out_user(path, name)
    click.echo(f"The sessions of {name} have ended.")


def _print_user(user: Any) -> None:
    disabled = "" if user.disabled_at is None else f"  (disabled {user.disabled_at})"
    grants = "; ".join(f"{grant.role.value}  {', '.join(grant.scope) or 'all VMs'}" for grant in user.grants)
    issuer = "" if user.person_key.startswith("local ") else f"  {user.person_key}"
    click.echo(f"{user.user_name}  {grants}{issuer}{disabled}")


def _password() -> str:
    if sys.stdin.isatty():
        return str(click.prompt("Password", hide_input=True, confirmation_prompt=True))
    return sys.stdin.readline().rstrip("\r\n")
