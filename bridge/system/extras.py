"""Explains how to install an optional extra of this distribution."""

from __future__ import annotations

import sys

_NAME = "scheduled-events-bridge"
_INSTALLED = f"/opt/{_NAME}/"
_INSTALLER = f"/usr/lib/{_NAME}/install.sh"


def how_to_install(extra: str) -> str:
    """Return a sentence that explains how to install *extra* by install.sh, image, or pip."""
    if sys.prefix.startswith(_INSTALLED):
        how = f"run install.sh --extras {extra} (a package contains it as {_INSTALLER})"
    else:
        how = f'build the image with this extra, or run "{sys.executable}" -m pip install "{_NAME}[{extra}]"'
    return f"It comes with the extra [{extra}]: {how}"
