"""Fixtures for the tools that check deploy/. A missing tool skips the test unless DEPLOY_TOOLS is `required`."""

from __future__ import annotations

import errno
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
from bicep import AZURE
from container_engine import why_not_here
from kubernetes_manifests import Manifest, built

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def deploy() -> Path:
    """Return the directory deploy/."""
    return ROOT / "deploy"


@pytest.fixture(scope="session")
def checkout() -> Path:
    """Return the directory of the sources: $CHECKOUT if the tests run elsewhere."""
    directory = Path(os.environ.get("CHECKOUT", ROOT)).resolve()
    if not (directory / "bridge").is_dir():
        pytest.fail(f"{directory} contains no sources. Set CHECKOUT to the checkout.")
    return directory


@pytest.fixture(scope="session")
def package_source(checkout: Path) -> Path:
    """Return the package to install: the wheel in $WHEEL, or the checkout."""
    return Path(os.environ["WHEEL"]).resolve() if os.environ.get("WHEEL") else checkout


@pytest.fixture(scope="session")
def clean_environment() -> dict[str, str]:
    """Return the environment without variables that affect the Python start, and with pip's cache."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV")
    rest = {key: value for key, value in os.environ.items() if key not in hidden}
    return rest | {"PIP_NO_CACHE_DIR": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


#: The unit hides these directories from the service, so its Python must be elsewhere.
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
    return absent("no Python 3.10 or newer with venv exists outside of /home and /root, which the service cannot see")


@pytest.fixture(scope="session")
def tool() -> Callable[[str], str]:
    """Return a function that finds a program by name; `.ci/run deploy` sets DEPLOY_TOOLS=required."""

    def find(name: str) -> str:
        found = os.environ.get("OTELCOL") if name == "otelcol" else None
        # Debian's daemons are in directories of root's PATH, and some tools are in the venv of the tests
        beside = [os.environ.get("PATH", ""), str(Path(sys.executable).parent), "/usr/sbin", "/sbin"]
        found = found or shutil.which(name, path=os.pathsep.join(beside))
        return found or absent(f"{name} is not on this machine")

    return find


@pytest.fixture
def promtool(tool: Callable[[str], str]) -> Callable[..., tuple[int, str]]:
    """Return a function that runs promtool and returns (exit status, output)."""
    program = tool("promtool")

    def run(*arguments: object) -> tuple[int, str]:
        command = [program, *map(str, arguments)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.fixture(scope="session")
def helm(
    tool: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs helm with its own home directory and returns the completed process."""
    home = tmp_path_factory.mktemp("helm")

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [tool("helm"), *map(str, arguments)]
        env = {"HOME": str(home), "PATH": "/usr/bin:/bin", "KUBECONFIG": str(home / "none")}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)

    return run


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
def kustomized(tool: Callable[[str], str], package: Callable[[str], ModuleType]) -> Callable[[Path], list[Manifest]]:
    """Return a function that builds the kustomization of a directory."""
    return lambda directory: built(directory, kustomize=tool("kustomize"), yaml=package("yaml"))


@pytest.fixture(scope="session")
def unable() -> Callable[..., NoReturn]:
    """Return a function that ends a test that the machine cannot run.

    Without root, the test is skipped. It is also skipped if *said*, the output of a program, shows that the kernel
    denies unshare or loop devices even to root, as in most containers. Every other reason is `absent`.
    """

    def end(sentence: str, said: str = "") -> NoReturn:
        if os.geteuid():
            pytest.skip(f"{sentence}: only root can")
        refused = refusal(said)
        if refused:
            pytest.skip(f"{sentence}: the kernel refuses {refused}")
        absent(f"{sentence}. {said}".strip())

    return end


@pytest.fixture(scope="session")
def stand_in_engine(tool: Callable[[str], str], unable: Callable[..., NoReturn]) -> Callable[[Path], Path]:
    """Return a function that checks for the namespaces of the container engine stand-in and returns its argument."""

    def at(directory: Path) -> Path:
        for name in ("unshare", "setpriv", "ip"):
            tool(name)
        said = why_not_here(directory)
        if said is not None:
            unable("no namespaces and overlays stand in for a container engine here", said)
        if Path(sys.base_prefix) == Path("/usr") or sys.version_info < (3, 11):
            # A distribution's Python cannot be overlaid on /usr/local. No tool is missing, so the test never fails.
            pytest.skip(
                "the Python of the tests cannot stand in for the base image's Python: needs 3.11 and its own prefix"
            )
        return directory

    return at


def refusal(said: str) -> str | None:
    """Return the denied operation and errno from the output *said* of unshare or a loop mount, or None."""
    for what, line in (("unshare", r"^unshare: .*"), ("loop devices", r"^.*\bloop\b.*")):
        for number in (errno.EPERM, errno.EACCES):
            if re.search(f"{line}{os.strerror(number)}", said, re.MULTILINE | re.IGNORECASE):
                return f"{what} ({errno.errorcode[number]})"
    return None


def absent(sentence: str) -> NoReturn:
    """Skip the test, or fail it if every tool is required."""
    if os.environ.get("DEPLOY_TOOLS") == "required":
        pytest.fail(sentence)
    pytest.skip(sentence)


# ---- the files from deploy/artifact/build.py, and a machine to install them on ---------------------------------------

NAME = "scheduled-events-bridge"
#: Machine name in archive names -> machine name of `uname -m`.
ARCHES = {"x86_64": "x86_64", "arm64": "aarch64"}
HERE = Path(__file__).parent
BOOT_SECONDS = 1400  # on a busy machine; an idle machine needs a sixth
#: The namespaces that boot.sh creates.
SPACES = ("--fork", "--pid", "--mount", "--net", "--cgroup", "--uts", "--ipc")


@pytest.fixture(scope="session")
def artifacts() -> Path:
    """Return the directory with the files from deploy/artifact/build.py."""
    name = os.environ.get("ARTIFACTS")
    return Path(name) if name else absent("ARTIFACTS is not set. Build the files with deploy/artifact/build.py.")


@pytest.fixture(scope="session")
def own_archive(artifacts: Path) -> Path:
    """Return the archive for this kind of machine."""
    arch = next((arch for arch, machine in ARCHES.items() if machine == platform.machine()), "this machine")
    (path,) = artifacts.glob(f"{NAME}-[0-9]*-linux-{arch}.tar.gz")
    return path


@pytest.fixture(scope="session")
def bare(tool: Callable[[str], str], unable: Callable[..., NoReturn]) -> str:
    """Return the directory of a bare Debian, on a machine that can boot it."""
    base = os.environ.get("BARE_DEBIAN")
    if os.geteuid():
        unable("no systemd of its own starts here")
    if not base or not Path(base, "usr").is_dir():
        absent("BARE_DEBIAN is not set: make one with debootstrap --variant=minbase --include=systemd,python3,rpm")
    for name in ("unshare", "ip"):
        tool(name)
    probe = subprocess.run(["unshare", *SPACES, "true"], capture_output=True, text=True, timeout=30, check=False)
    if probe.returncode:
        unable("no systemd of its own starts here, in namespaces", probe.stderr)
    return str(base)


@pytest.fixture(scope="session")
def simulator(
    own_archive: Path, service_python: Path, clean_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return a separate installation of the agent that simulates the metadata service."""
    directory = tmp_path_factory.mktemp("simulator")
    subprocess.run(["tar", "-C", directory, "-xzf", own_archive], timeout=60, check=True)
    (unpacked,) = directory.glob(f"{NAME}-*")
    subprocess.run(
        [unpacked / "install.sh", "--root", directory / "own", "--python", service_python],
        env=clean_environment, capture_output=True, timeout=300, check=True,
    )  # fmt: skip
    return (directory / f"own/opt/{NAME}/venv").resolve()


@pytest.fixture(scope="session")
def drive(bare: str, simulator: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, str]]:
    """Return a function that boots the bare Debian, runs drive.sh of a directory there, and returns its facts."""

    def boot(name: str, *goods: Path) -> dict[str, str]:
        directory = tmp_path_factory.mktemp(name)
        shutil.copytree(HERE / "artifact", directory / "goods")
        for path in [HERE / name / "drive.sh", *goods]:
            shutil.copy(path, directory / "goods")
        shutil.copytree(simulator, directory / "goods/simulator", symlinks=True)
        with (directory / "console").open("wb") as console:
            subprocess.run(
                ["bash", HERE / "systemd/boot.sh", "none", directory], env={**os.environ, "BASE": bare},
                stdout=console, stderr=console, timeout=BOOT_SECONDS, check=False,
            )  # fmt: skip
        for said in ("console", "results/log"):  # shown when a test fails
            found = directory / said
            sys.stdout.write(f"---- {said}\n{found.read_text() if found.exists() else 'none'}\n")
        facts = directory / "results/facts"
        lines = facts.read_text().splitlines() if facts.exists() else []
        return dict(line.split("=", 1) for line in lines)

    return boot


@pytest.fixture(scope="session")
def parse(package: Callable[[str], ModuleType]) -> Callable[[str], Any]:
    """Return a function that parses one file of deploy/azure."""
    tree_sitter, grammar = package("tree_sitter"), package("tree_sitter_bicep")
    parser = tree_sitter.Parser(tree_sitter.Language(grammar.language()))

    @cache
    def parsed(name: str) -> Any:
        return parser.parse((AZURE / name).read_bytes()).root_node

    return parsed
