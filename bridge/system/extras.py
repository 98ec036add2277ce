"""How to add an extra of this distribution to the very environment that this program runs in.

"pip install" alone is wrong advice on a VM: the service's Python is not the one on the PATH, and a tree of install.sh
has no pip. So the sentence goes by what is found: a tree of install.sh, an image, a checkout, or a package.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_NAME = "scheduled-events-bridge"
#: The file in which install.sh remembers which extras a tree has.
_REMEMBERED = "extras"
#: Where install.sh, the packages and the image have the program; without that file it is one of the latter.
_OPT = f"/opt/{_NAME}"


def how_to_install(extra: str, *, prefix: Path | None = None, python: str | None = None) -> str:
    """Return the sentence that says how *extra* comes into the environment at *prefix*, by default this one."""
    prefix, python = prefix or Path(sys.prefix), python or sys.executable
    begin = f"It comes with the extra [{extra}]: "
    remembered = prefix / _REMEMBERED
    if remembered.is_file():
        extras = ",".join(dict.fromkeys([*_listed(remembered), extra]))
        return f"{begin}run install.sh again, of the same version, with --extras {extras}"
    if _OPT in map(str, prefix.parents):
        return (
            f"{begin}build the image with --build-arg EXTRAS={extra}, or on a VM run install.sh with --extras {extra}"
        )
    pip = f"{_quoted(python)} -m pip install"
    if find_spec("pip") is None:
        pip = f"python3 -m pip --python {_quoted(python)} install"
    return f"{begin}{pip} {_quoted(f'{_source()}[{extra}]')}"


def _listed(remembered: Path) -> list[str]:
    try:
        return [each for each in remembered.read_text().strip().split(",") if each]
    except (OSError, ValueError):
        return []


def _source() -> str:
    """Return what this distribution was installed from, where that is still there; else its name."""
    try:
        came = json.loads(distribution(_NAME).read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return _NAME
    path = _path(came)
    return str(path) if path is not None and path.exists() else _NAME


def _path(came: Any) -> Path | None:
    url = came.get("url") if isinstance(came, dict) else None
    parts = urlsplit(url) if isinstance(url, str) else None
    return Path(unquote(parts.path)) if parts is not None and parts.scheme == "file" else None


def _quoted(text: str) -> str:
    if os.name == "nt":
        return f'"{text}"'
    quoted = shlex.quote(text)
    return f"'{text}'" if quoted == text and "[" in text else quoted
