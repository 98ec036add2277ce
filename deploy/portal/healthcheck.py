# ruff: noqa: INP001
"""Ask the portal in this container whether it answers: exit 0 if it does, 1 if not.

Where it listens is read from the configuration that it runs with, so nothing is said twice. A file that is broken now
is not called ill: the portal that runs has read another.
"""

import http.client
import os
import sys

import tomllib

CONFIG = os.environ.get("SCHEDULED_EVENTS_PORTAL_CONFIG") or "/etc/scheduled-events-portal/portal.toml"
DEFAULT = "127.0.0.1:9465"
TIMEOUT_SECONDS = 5
HERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # to ask, not to listen


def main() -> str:
    """Return what is wrong, or nothing."""
    try:
        with open(CONFIG, "rb") as file:  # noqa: PTH123  # pathlib would cost a tenth of the run
            listen = str(tomllib.load(file).get("operator", {}).get("listen", DEFAULT))
    except (OSError, ValueError, AttributeError) as error:
        sys.stdout.write(f"Not asked: {CONFIG} cannot be read: {error}\n")
        return ""
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    connection = http.client.HTTPConnection(HERE.get(host, host), int(port), timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        said = answer.read(2000).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return f"No answer from {listen}: {error}"
    return "" if answer.status == http.HTTPStatus.OK else said


if __name__ == "__main__":
    sys.exit(main() or 0)
