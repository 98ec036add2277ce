"""Implements `portal check-config`, which reports mistakes before the portal starts.

Without `--connect`, the checks only read local files. All checks run with the permissions of the current user.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

from bridge.approval.signing import DecisionSigner
from bridge.clock import REAL_CLOCK
from bridge.config.trusted_keys import unusable_keys
from bridge.errors import BridgeError, ConfigurationError
from bridge.portal.certificate_chain import certificates_in
from bridge.portal.inventory import read_inventory
from bridge.portal.migrations import current
from bridge.portal.oidc import OidcProvider
from bridge.portal.settings import PortalSettings, ServerSettings, check_secrets, database_file
from bridge.portal.store.database import Store


def problems(settings: PortalSettings, *, connect: bool) -> Iterator[str]:
    """Yield each problem that would keep the portal from starting or would block decisions."""
    for where, check in _checks(settings, connect=connect):
        try:
            check()
        except ConfigurationError as error:
            yield from error.mistakes
        except (BridgeError, OSError, ValueError) as error:
            yield f"{where}{error}"
    yield from unusable_keys([key.trusted() for key in settings.keys])


def _checks(settings: PortalSettings, *, connect: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    yield "", partial(check_secrets, settings)
    signing, attested = settings.signing, settings.agents.attested
    if signing is not None:
        load = partial(DecisionSigner, kid=signing.kid, approver=signing.approver)
        yield "signing.private_key_file: ", partial(load, signing.private_key_file)
    files = {} if attested is None else {"roots": attested.roots_file, "intermediates": attested.intermediates_file}
    for name, file in files.items():
        if file is not None:
            yield f"agents.attested.{name}_file: ", partial(certificates_in, Path(file))
    if settings.server.cert_file is not None:
        yield "", partial(load_certificate, settings.server)
    if settings.inventory.file is not None:
        yield "inventory.file: ", partial(read_inventory, Path(settings.inventory.file))
    if connect:
        yield "database: ", partial(_read_database, settings)
    if connect and settings.people.oidc is not None:
        yield "people.oidc: ", OidcProvider(settings.people.oidc, redirect_uri="", clock=REAL_CLOCK).check


def new_database(settings: PortalSettings) -> Path | None:
    """Return the SQLite file that the portal creates when it starts, or None."""
    file = database_file(settings)
    return None if settings.database.url is not None or file.exists() else file


def load_certificate(server: ServerSettings) -> None:
    """Raise ConfigurationError unless the portal can use the certificate of *server*."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(server.cert_file or "", server.key_file)
    except OSError as error:  # includes SSLError
        raise ConfigurationError(
            f"server.cert_file or server.key_file cannot be used: {error}. Both must be readable PEM files that belong "
            "together."
        ) from error


def _read_database(settings: PortalSettings) -> None:
    file = new_database(settings)
    if file is not None:
        directory = next(each for each in file.parents if each.exists())
        if not directory.is_dir() or not os.access(directory, os.W_OK):
            raise BridgeError(f"{file} does not exist, and the portal cannot create it in {directory}.")
        return
    with closing(Store.of_settings(settings)) as store:
        store.read(current)
