"""Explains how to install an optional extra of this distribution."""

from __future__ import annotations

import sys

_NAME = "scheduled-events-bridge"


def how_to_install(extra: str) -> str:
    """Return a sentence that explains how to install *extra* by install.sh, image, or pip."""
    return (
        f"It comes with the extra [{extra}]: run install.sh or build the image with this extra, or run "
        f'"{sys.executable}" -m pip install "{_NAME}[{extra}]"'
    )
