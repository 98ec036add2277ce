# ruff: noqa: INP001
"""Health check for the agent's container. Exits with 1 if `/healthz` does not return 200.

The check reads the agent's address from the environment or the configuration file. It exits with 0 if `status.listen`
is off. It also exits with 0 if the configuration file cannot be read, because an invalid file does not affect a running
agent.
"""

import http.client
import os
import sys

import tomllib

CONFIG = os.environ.get("SCHEDULED_EVENTS_BRIDGE_CONFIG") or "/etc/scheduled-events-bridge/config.toml"
DEFAULT = "127.0.0.1:9464"
VARIABLE = "SCHEDULED_EVENTS_BRIDGE_STATUS_LISTEN"
TIMEOUT_SECONDS = 5
HERE = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}  # noqa: S104  # only for requests


def main() -> str:
    """Return the problem, or "" if the agent is healthy."""
    try:
        listen = configured()
    except (OSError, ValueError, AttributeError) as error:
        sys.stdout.write(f"Not checked: {CONFIG} cannot be read: {error}\n")
        return ""
    if not listen:
        sys.stdout.write("Not checked: status.listen is off\n")
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


def configured() -> str:
    """Return status.listen from the environment, else from the file, else the default."""
    if os.environ.get(VARIABLE):
        return os.environ[VARIABLE]
    if not os.path.exists(CONFIG):  # noqa: PTH110  # pathlib would cost a tenth of the run
        return DEFAULT
    with open(CONFIG, "rb") as file:  # noqa: PTH123
        listen = tomllib.load(file).get("status", {}).get("listen", DEFAULT)
    return str(listen)


if __name__ == "__main__":
    sys.exit(main() or 0)
