"""Where the tools are that judge deploy/, and what the machine can: skipped without, but not where it is required."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def deploy() -> Path:
    """Return the directory deploy/."""
    return ROOT / "deploy"


@pytest.fixture(scope="session")
def checkout() -> Path:
    """Return the directory that holds the sources: $CHECKOUT, where the tests were carried away from them."""
    directory = Path(os.environ.get("CHECKOUT", ROOT)).resolve()
    if not (directory / "bridge").is_dir():
        pytest.fail(f"{directory} holds no sources. Set CHECKOUT to the checkout.")
    return directory


@pytest.fixture(scope="session")
def package_source(checkout: Path) -> Path:
    """Return what to install: the wheel that $WHEEL names, else the checkout."""
    return Path(os.environ["WHEEL"]).resolve() if os.environ.get("WHEEL") else checkout


@pytest.fixture(scope="session")
def clean_environment() -> dict[str, str]:
    """Return the environment without what changes how Python starts, and with pip's cache."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV")
    rest = {key: value for key, value in os.environ.items() if key not in hidden}
    return rest | {"PIP_NO_CACHE_DIR": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


#: The unit hides these from the service, so its Python may not live there.
HIDDEN = (Path("/home"), Path("/root"), Path("/tmp"), Path("/run/user"))  # compared, not used


@pytest.fixture(scope="session")
def service_python() -> Path:
    """Return a Python of 3.10 or newer, with venv, that the service can see."""
    for candidate in (Path(sys.base_prefix) / "bin/python3", Path("/usr/bin/python3"), Path("/usr/local/bin/python3")):
        if any(hidden in candidate.resolve().parents for hidden in HIDDEN) or not candidate.exists():
            continue
        fits = "import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 10))"
        if subprocess.run([candidate, "-c", fits], capture_output=True, timeout=30, check=False).returncode == 0:
            return candidate
    return absent("outside of /home and /root, where a service could see it, is no Python of 3.10 or newer with venv")


@pytest.fixture(scope="session")
def tool() -> Callable[[str], str]:
    """Return a function that finds a program by name; `.ci/run deploy` sets DEPLOY_TOOLS=required."""

    def find(name: str) -> str:
        found = os.environ.get("OTELCOL") if name == "otelcol" else None
        # Debian's daemons are where only root looks; the venv that runs the tests brings some tools of its own
        beside = [os.environ.get("PATH", ""), str(Path(sys.executable).parent), "/usr/sbin", "/sbin"]
        found = found or shutil.which(name, path=os.pathsep.join(beside))
        return found or absent(f"{name} is not on this machine")

    return find


@pytest.fixture(scope="session")
def package() -> Callable[[str], ModuleType]:
    """Return a function that imports a Python package by name, or skips."""

    def load(name: str) -> ModuleType:
        try:
            return __import__(name)
        except ImportError:
            return absent(f"the Python package {name} is not installed")

    return load


@pytest.fixture(scope="session")
def unable() -> Callable[..., NoReturn]:
    """Return a function that ends a test whose machine cannot do what it takes.

    Others than root may lack it: skipped. So is what *said*, the words of a program, shows that the kernel refuses to
    root too, as in most containers: unshare and loop devices, and nothing else. All the rest is `absent`.
    """

    def end(sentence: str, said: str = "") -> NoReturn:
        if os.geteuid():
            pytest.skip(f"{sentence}: only root can")
        refused = refusal(said)
        if refused:
            pytest.skip(f"{sentence}: the kernel refuses {refused}")
        absent(f"{sentence}. {said}".strip())

    return end


def refusal(said: str) -> str | None:
    """Return what the kernel refuses and its errno, by what unshare or a loop mount *said*; None for other faults."""
    for what, line in (("unshare", r"^unshare: .*"), ("loop devices", r"^.*\bloop\b.*")):
        for number in (errno.EPERM, errno.EACCES):
            if re.search(f"{line}{os.strerror(number)}", said, re.MULTILINE | re.IGNORECASE):
                return f"{what} ({errno.errorcode[number]})"
    return None


def absent(sentence: str) -> NoReturn:
    """Skip, or fail where every tool must be there."""
    if os.environ.get("DEPLOY_TOOLS") == "required":
        pytest.fail(sentence)
    pytest.skip(sentence)
