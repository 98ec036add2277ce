# ruff: noqa: INP001
"""Health check for the portal's container. Exits with 1 if `/healthz` does not return 200.

The check reads the portal's address from the configuration file. It exits with 0 if the file cannot be read, because
the running portal might have read an earlier, valid version of the file.
"""

import http.client
import os
import sys

import tomllib

CONFIG = os.environ.get("SCHEDULED_EVENTS_PORTAL_CONFIG") or "/etc/scheduled-events-portal/portal.toml"
DEFAULT = "127.0.0.1:9465"
TIMEOUT_SECONDS = 5
HERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # only for requests


def main() -> str:
    """Return the problem, or "" if the portal is healthy."""
    try:
        with open(CONFIG, "rb") as file:  # noqa: PTH123  # pathlib would cost a tenth of the run
            listen = str(tomllib.load(file).get("operator", {}).get("listen", DEFAULT))
    except (OSError, ValueError, AttributeError) as error:
        sys.stdout.write(f"Not checked: {CONFIG} cannot be read: {error}\n")
        return ""
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    connection = http.client.HTTPConnection(HERE.get(host, host), int(port), timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        said = answer.read(2000).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return f"No response from {listen}: {error}"
    return "" if answer.status == http.HTTPStatus.OK else said


if __name__ == "__main__":
    sys.exit(main() or 0)
