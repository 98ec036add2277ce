"""Detects a second agent on this machine. Two agents on one VM would send every record twice.

The check asks the status address of this configuration and the default status address, and looks at the lock on the
service's state directory. An agent with another metadata service, such as a simulator, watches another VM. Agents with
a metadata service on this machine never count, so demos and tests can run at the same time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from bridge.config.loader import Settings, find_config, load_top, service_directory
from bridge.config.settings import StatusSettings
from bridge.errors import ConfigurationError, StateDirectoryError
from bridge.health.client import query_readyz
from bridge.http.failures import is_loopback
from bridge.outbox.lock import is_locked

logger = logging.getLogger(__name__)

_AUTO = "auto"


def refuse_second_agent(settings: Settings, directory: Path, *, advice: str) -> None:
    """Raise StateDirectoryError with *advice* if another agent watches the VM of *settings*.

    The service's own agent only logs a warning, because an agent that does not start misses every event.
    """
    service = service_directory()
    other = _other_agent(settings, directory.absolute(), service)
    if other is None:
        return
    if directory.absolute() == service:
        logger.warning(
            "Another agent also watches this VM and sends every record a second time. Stop the other agent.",
            extra={"state_directory": other},
        )
        return
    whose = "The service's agent" if other == str(service) else "Another agent"
    raise StateDirectoryError(
        f"{whose} already watches this VM, with the state directory {other}. Two agents would send every record twice. "
        f"{advice}"
    )


def _other_agent(settings: Settings, directory: Path, service: Path) -> str | None:
    """Return the state directory of another agent that watches the VM of *settings*."""
    return None if _is_simulated(settings.imds.endpoint) else next(_others(settings, directory, service), None)


def _others(settings: Settings, directory: Path, service: Path) -> Iterator[str]:
    for status in dict.fromkeys((settings.status, StatusSettings())):
        live = query_readyz(status).readiness
        if live is not None and Path(live.state_directory) != directory and _is_same(live.imds, settings):
            yield live.state_directory
    # None means that this user has no access. A directory that exists is reason enough to refuse.
    if service != directory and is_locked(service) is not False and not _is_simulated(_endpoint_of_service()):
        yield str(service)


def _is_same(endpoint: str, settings: Settings) -> bool:
    own = settings.imds.endpoint
    if own == _AUTO:  # the address is not known yet
        return not _is_simulated(endpoint)
    return endpoint.rstrip("/").lower() == own.rstrip("/").lower()


def _is_simulated(endpoint: str) -> bool:
    return is_loopback(urlsplit(endpoint).hostname or "")


def _endpoint_of_service() -> str:
    """Return the metadata service of the system's configuration, or "auto" if it cannot be read."""
    try:
        return load_top(find_config(None, {})).imds.endpoint
    except (ConfigurationError, OSError):
        return _AUTO
