# ruff: noqa: INP001
"""Try an installed agent, for install.sh, which runs this by the Python of the tree that it is about to trust.

    PYTHON -I - imports EXTRAS    exit 1 unless every module and every compiled library of the tree can be loaded
    PYTHON -I - ready SECONDS     exit 1 unless the running agent says within that time that it is ready

It comes by standard input, so that the service's user need not be able to read where the installer lies.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys
import sysconfig
import time
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

SERVICE = "scheduled-events-bridge.service"
#: A program for people at a terminal, whose library may be left out, and the portal, which is no part of an agent.
NOT_FOR_A_SERVICE = ("bridge.cli.demo_view", "bridge.cli.demo_portal", "bridge.__main__", "bridge.portal")
#: One library that is missing is missed by nearly every module.
MOST_LINES = 5
#: What the agent and its libraries load only where they use it, by extra; "" is for all.
LOADED_LATE = {
    "": ("azure.eventhub", "azure.identity", "google.protobuf.message", "jwt", "opentelemetry.sdk.resources"),
    "apprise": ("apprise",),
    "template": ("jinja2",),
    "websocket": ("aiohttp",),
}


def imports(extras: list[str]) -> list[str]:
    """Return what cannot be loaded, a line each."""
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
        except Exception as error:  # noqa: BLE001  # whatever it is, this tree cannot run
            wrong.append(f"{name} cannot be loaded: {type(error).__name__}: {error}")
    more = len(wrong) - MOST_LINES
    return wrong if more <= 0 else [*wrong[:MOST_LINES], f"{more} more cannot be loaded"]


def ready(seconds: float) -> list[str]:
    """Return why the agent is not ready after *seconds*; nothing once it is, or where it answers nobody."""
    from bridge.config.loader import find_config, load  # noqa: PLC0415  # of the tree that is tried
    from bridge.health.client import query_readyz  # noqa: PLC0415

    status = load(find_config(None, os.environ)).status
    until = time.monotonic() + seconds
    while True:
        answer = query_readyz(status)
        if answer.url is None:  # nothing to ask: it started, and told systemd that it works
            return []
        if answer.readiness is not None and answer.readiness.is_ready:
            return []
        if not runs():
            return ["It does not go on running."]
        if time.monotonic() >= until:
            reasons = answer.readiness.reasons if answer.readiness else ()
            return [*reasons] or [answer.problem or "It does not answer."]
        time.sleep(0.25)


def runs() -> bool:
    """Return whether systemd has the service running."""
    asked = ["systemctl", "is-active", "--quiet", SERVICE]
    return subprocess.run(asked, check=False).returncode == 0  # noqa: S603


def main() -> int:
    """Print what is wrong and return the exit code."""
    wrong = imports(sys.argv[2].split(",")) if sys.argv[1] == "imports" else ready(float(sys.argv[2]))
    for line in wrong:
        sys.stderr.write(f"{line}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
