# ruff: noqa: INP001
"""Tests an installed agent.

install.sh runs this file with the installed agent's Python interpreter.

    PYTHON -I - imports EXTRAS          exit 1 unless every module and compiled library of the tree can be loaded
    PYTHON -I - reasons                 print why the running agent is not ready, one reason per line
    PYTHON -I - ready SECONDS [FILE]    exit 1 unless the running agent is ready within SECONDS. Reasons that are also
                                        in FILE, which contains the output of `reasons`, do not count

The service user might not have access to this file, so the installer passes the file to Python on standard input.
"""

from __future__ import annotations

import http.client
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import sysconfig
import time
import urllib.request
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

SERVICE = "scheduled-events-bridge.service"
#: The agent does not need these modules, and their libraries might be missing.
NOT_FOR_A_SERVICE = ("bridge.cli.demo_view", "bridge.cli.demo_portal", "bridge.__main__", "bridge.portal")
#: Two reasons are the same if they are equal after these substitutions. The first keeps only the name of a sink,
#: because all of its states mean that the destination accepts no records. The second keeps only the error of IMDS. The
#: third removes ages. The Ansible role contains the same substitutions.
SAME_REASON = ((r"^(Sink \S+) .*", r"\1"), (r"^[^:]*\bIMDS\b[^:]*", "IMDS"), (r"[0-9.]+ s\b", ""))
#: The oldest record of a stuck sink has waited for five minutes, which is longer than an upgrade takes. The role also
#: ignores this reason.
OLDER_THAN_THE_UPGRADE = " is stuck: "
#: The number of failures to print. If one library is missing, nearly every module fails.
MOST_LINES = 5
#: The modules of each extra that are imported only when they are used. The key "" applies to every agent.
LOADED_LATE = {
    "": ("azure.eventhub", "azure.identity", "google.protobuf.message", "jwt", "opentelemetry.sdk.resources"),
    "apprise": ("apprise",),
    "template": ("jinja2",),
    "websocket": ("aiohttp",),
}


def imports(extras: list[str]) -> list[str]:
    """Return a line for each module that cannot be loaded."""
    names = ["bridge", "sinks"]
    for top in names[:]:
        names += [found.name for found in pkgutil.walk_packages([*importlib.import_module(top).__path__], f"{top}.")]
    site = Path(sysconfig.get_path("purelib"))
    for path in sorted(site.rglob(f"*{EXTENSION_SUFFIXES[-1]}")):
        suffix = next(suffix for suffix in EXTENSION_SUFFIXES if path.name.endswith(suffix))
        names.append(".".join(path.relative_to(site).parts).removesuffix(suffix))
    names += [name for extra in ["", *extras] for name in LOADED_LATE.get(extra, ())]
    wrong = []
    for name in names:
        if f"{name}.".startswith(tuple(f"{other}." for other in NOT_FOR_A_SERVICE)):
            continue
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  # after any error, this tree cannot run
            wrong.append(f"{name} cannot be loaded: {type(error).__name__}: {error}")
    more = len(wrong) - MOST_LINES
    return wrong if more <= 0 else [*wrong[:MOST_LINES], f"{more} more cannot be loaded"]


def reasons() -> list[str]:
    """Return the reasons why the running agent is not ready."""
    readiness = ask()[0]
    return [] if readiness is None else [*readiness.reasons]


def ready(seconds: float, before: list[str]) -> list[str]:
    """Return the reasons why the agent is not ready after *seconds*.

    The reasons in *before* do not count, because a destination that was already failing before an upgrade must not
    prevent the upgrade.
    """
    excused = {without_details(reason) for reason in before}
    until = time.monotonic() + seconds
    while True:
        readiness, problem = ask()
        if problem is None and readiness is None:  # without a status address, a notification to systemd is sufficient
            return []
        if readiness is not None:
            counted = [reason for reason in readiness.reasons if OLDER_THAN_THE_UPGRADE not in reason]
            if not {without_details(reason) for reason in counted} - excused:
                return []
        if not runs():
            return ["The service does not keep running."]
        if time.monotonic() >= until:
            return [problem] if readiness is None else [*readiness.reasons]
        time.sleep(0.25)


def ask() -> tuple[Any, Any]:
    """Return the readiness of the agent and the error of the request.

    Both are None if the configuration has no status address.
    """
    import msgspec  # noqa: PLC0415  # of the tested tree

    from bridge.config.loader import find_config, load  # noqa: PLC0415
    from bridge.health.readiness import Readiness  # noqa: PLC0415

    address = load(find_config(None, os.environ)).status.address
    if address is None or address[1] == 0:
        return None, None
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address[0], address[0])  # noqa: S104  # only for requests
    url = f"http://{f'[{host}]' if ':' in host else host}:{address[1]}/readyz"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), AnyStatus())
    try:
        with opener.open(url, timeout=1.0) as response:
            return msgspec.json.decode(response.read(), type=Readiness), None
    except OSError:
        return None, f"No agent responds at {url}."
    except (msgspec.MsgspecError, ValueError, http.client.HTTPException):
        return None, f"The program at {url} is not this agent."


class AnyStatus(urllib.request.HTTPErrorProcessor):
    """Accepts a response with any status.

    An agent that is not ready responds with 503.
    """

    def http_response(self, _request: Any, response: Any) -> Any:
        """Return *response*."""
        return response


def without_details(reason: str) -> str:
    """Return the part of *reason* that identifies the problem."""
    for pattern, replacement in SAME_REASON:
        reason = re.sub(pattern, replacement, reason)
    return reason


def runs() -> bool:
    """Return whether the systemd service is running."""
    asked = ["systemctl", "is-active", "--quiet", SERVICE]
    return subprocess.run(asked, check=False).returncode == 0  # noqa: S603


def main() -> int:
    """Print the result and return the exit code."""
    command, *arguments = sys.argv[1:]
    if command == "reasons":
        sys.stdout.writelines(f"{reason}\n" for reason in reasons())
        return 0
    if command == "imports":
        wrong = imports(arguments[0].split(","))
    else:
        wrong = ready(float(arguments[0]), Path(arguments[1]).read_text().splitlines() if arguments[1:] else [])
    for line in wrong:
        sys.stderr.write(f"{line}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
