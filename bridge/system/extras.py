"""The sentence that tells a user how to install an extra of this distribution into this environment.

"pip install" alone is the wrong advice on a VM, because the service's Python is not the one on the PATH, and a tree of
install.sh has no pip.
"""

from __future__ import annotations

import sys
from pathlib import Path

_NAME = "scheduled-events-bridge"
#: The file in which install.sh stores the extras of a tree.
_INSTALLED_EXTRAS = "extras"
#: The location of the program in the image and in the packages, which have no such file.
_OPT = f"/opt/{_NAME}"


def how_to_install(extra: str, *, prefix: Path | None = None, python: str | None = None) -> str:
    """Return how to install *extra* into the environment at *prefix*, by default this environment."""
    prefix, python = prefix or Path(sys.prefix), python or sys.executable
    begin = f"It comes with the extra [{extra}]: "
    installed = prefix / _INSTALLED_EXTRAS
    if installed.is_file():
        extras = [each for each in installed.read_text().strip().split(",") if each]
        wanted = ",".join(dict.fromkeys([*extras, extra]))
        return f"{begin}run install.sh again, of the same version, with --extras {wanted}"
    if _OPT in map(str, prefix.parents):
        return (
            f"{begin}build the image with --build-arg EXTRAS={extra}, or on a VM run install.sh with --extras {extra}"
        )
    return f'{begin}"{python}" -m pip install "{_NAME}[{extra}]"'
