"""The sentence that explains how to install an extra of this distribution."""

from __future__ import annotations

import sys

_NAME = "scheduled-events-bridge"


def how_to_install(extra: str) -> str:
    """Return how to install *extra*: pip of this Python, or install.sh, which also knows the other extras."""
    return (
        f"It comes with the extra [{extra}]: run install.sh or build the image with this extra, or run "
        f'"{sys.executable}" -m pip install "{_NAME}[{extra}]"'
    )
