"""Whether another agent of this machine watches the same VM: two would tell of every event twice.

It is looked for where agents are: behind the status address of this configuration and the usual one, and on the state
directory of the service. One that watches another metadata service, such as a simulator, is another VM's. So is every
agent on a metadata service of this machine: demos, tests and trials run side by side.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from bridge.config.loader import Settings, find_config, load, service_directory
from bridge.config.settings import StatusSettings
from bridge.errors import ConfigurationError, StateDirectoryError
from bridge.health.client import query_readyz
from bridge.http.failures import is_loopback
from bridge.outbox.lock import is_locked

logger = logging.getLogger(__name__)

_AUTO = "auto"


def refuse_beside_another(settings: Settings, directory: Path, *, instead: str, service: Path | None = None) -> None:
    """Raise StateDirectoryError when another agent watches the VM of *settings*; *instead* says what to do.

    The *service* itself only logs a warning: an agent that stays down misses every event.
    """
    service = service or service_directory()
    other = other_agent(settings, directory, service=service)
    if other is None:
        return
    if directory.absolute() == service:
        logger.warning(
            "Another agent watches this VM too, and tells of every event once more. End that one.",
            extra={"state_directory": other},
        )
        return
    whose = "The service's agent watches" if other == str(service) else "Another agent watches"
    raise StateDirectoryError(
        f"{whose} this VM already, with its state in {other}: two would tell of every event twice. {instead}"
    )


def other_agent(settings: Settings, directory: Path, *, service: Path) -> str | None:
    """Return the state directory of another agent that watches the VM of *settings*; None when none is found."""
    if _is_simulated(settings.imds.endpoint):
        return None
    return next(_others(settings, directory.absolute(), service), None)


def _others(settings: Settings, directory: Path, service: Path) -> Iterator[str]:
    for status in dict.fromkeys((settings.status, StatusSettings())):
        live = query_readyz(status).readiness
        if live is not None and Path(live.state_directory) != directory and _is_same(live.imds, settings):
            yield live.state_directory
    # None: this user may not look. That there is one is reason enough to ask.
    if service != directory and is_locked(service) is not False and not _is_simulated(_endpoint_of_service()):
        yield str(service)


def _is_same(endpoint: str, settings: Settings) -> bool:
    own = settings.imds.endpoint
    if own == _AUTO:  # where that leads is not known yet
        return not _is_simulated(endpoint)
    return endpoint.rstrip("/").lower() == own.rstrip("/").lower()


def _is_simulated(endpoint: str) -> bool:
    return is_loopback(urlsplit(endpoint).hostname or "")


def _endpoint_of_service() -> str:
    """Return the metadata service of the system's configuration, as far as it can be read; else "auto"."""
    try:
        return load(find_config(None, {})).imds.endpoint
    except (ConfigurationError, OSError):
        return _AUTO
