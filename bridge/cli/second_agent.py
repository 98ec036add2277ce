"""Refuses to start an agent on a machine whose service already runs one. Two agents would send every record twice."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from bridge.config.loader import Settings, service_directory
from bridge.errors import StateDirectoryError
from bridge.http.failures import is_loopback
from bridge.outbox.lock import is_locked


def refuse_second_agent(settings: Settings, directory: Path) -> None:
    """Raise StateDirectoryError if the service's agent runs and *directory* is not its state directory.

    An agent with a metadata service on this machine is allowed, because a simulator is another VM.
    """
    service = service_directory()
    if directory.absolute() == service or is_loopback(urlsplit(settings.imds.endpoint).hostname or ""):
        return
    if is_locked(service) is not False:  # None: the directory exists, but this user has no access
        raise StateDirectoryError(
            f"The service's agent already watches this VM, with the state directory {service}. Two agents would send "
            "every record twice. Use `status` for the service's agent, with sudo. To start this agent as well, use "
            "--allow-second-agent."
        )
