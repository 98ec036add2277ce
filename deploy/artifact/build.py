# ruff: noqa: INP001
"""Build the release archives, which contain everything to install the agent.

    python3 -m venv build && build/bin/pip install --require-hashes -r deploy/artifact/tools.txt
    build/bin/python -m pip wheel --no-deps --wheel-dir dist .
    build/bin/python deploy/artifact/build.py --wheel dist/scheduled_events_bridge-*.whl --out dist

The archives contain the wheels that requirements.txt pins by hash, for every supported Python version. They do not
contain Python, because the VM's own Python receives security updates along with the operating system.

- scheduled-events-bridge-VERSION-linux-ARCH.tar.gz: the agent, install.sh, the systemd unit, and the `template` extra
- scheduled-events-bridge-extras-VERSION-linux-ARCH.tar.gz: the `apprise` and `websocket` extras, to unpack over it
- scheduled-events-bridge-VERSION-windows-x86_64.zip: the agent, install.ps1, and every extra

To make builds reproducible, every packed file gets the modification time SOURCE_DATE_EPOCH.
"""

from __future__ import annotations

import argparse
import email
import gzip
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

import packages
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import NormalizedName, canonicalize_name, parse_wheel_filename

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SYSTEMD = HERE.parent / "systemd"
WINDOWS = HERE.parent / "windows"
NAME = "scheduled-events-bridge"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
#: The name of each architecture in the archives, and in the output of `uname -m`.
MACHINES = {"x86_64": "x86_64", "arm64": "aarch64"}
#: The value of `platform.machine()` on Windows.
AMD64 = "AMD64"
#: Oldest first. A wheel for glibc 2.17 also runs on every newer version.
PLATFORMS = ("manylinux_2_17", "manylinux2014", "manylinux_2_28")
#: The main archive contains only the small extras.
SMALL_EXTRAS = ("template",)
LARGE_EXTRAS = ("apprise", "websocket")
#: Omitted requirements. Only the command `demo` uses rich, and `demo` also works without rich.
LEFT_OUT = frozenset({canonicalize_name("rich")})
#: 2020-02-02, the date that hatchling gives to the files of a wheel.
DEFAULT_EPOCH = 1_580_601_600


@dataclass(frozen=True)
class Locked:
    """A locked requirement with its hashes."""

    name: NormalizedName
    version: str
    marker: Marker | None
    hashes: frozenset[str]

    @property
    def pin(self) -> str:
        """Return the name and the version in the format of pip."""
        return f"{self.name}=={self.version}"

    def line(self, hashes: Iterable[str]) -> str:
        """Return the line for a requirements file that accepts only *hashes*."""
        marker = f" ; {self.marker}" if self.marker else ""
        return (
            " \\\n    ".join([f"{self.pin}{marker}", *(f"--hash=sha256:{digest}" for digest in sorted(hashes))]) + "\n"
        )


@dataclass(frozen=True)
class Target:
    """A Python version and an architecture.

    The architecture AMD64 implies Windows, and all others imply Linux.
    """

    python: str
    machine: str

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables of environment markers (PEP 508)."""
        return {
            "python_version": self.python,
            "python_full_version": f"{self.python}.0",
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.0",
            "platform_python_implementation": "CPython",
            "platform_machine": self.machine,
            "platform_system": "Windows" if self.machine == AMD64 else "Linux",
            "sys_platform": "win32" if self.machine == AMD64 else "linux",
            "os_name": "nt" if self.machine == AMD64 else "posix",
            "platform_release": "",
            "platform_version": "",
        }

    @property
    def platforms(self) -> list[str]:
        """Return the platform tags of compatible wheels."""
        return ["win_amd64"] if self.machine == AMD64 else [f"{platform}_{self.machine}" for platform in PLATFORMS]

    def tags(self) -> frozenset[Tag]:
        """Return all tags of compatible wheels."""
        major, minor = map(int, self.python.split("."))
        own = cpython_tags((major, minor), platforms=self.platforms)
        common = compatible_tags((major, minor), f"cp{major}{minor}", self.platforms)
        return frozenset((*own, *common))

    def takes(self, marker: Marker | None, extra: str = "") -> bool:
        """Return whether *marker* is true for this target."""
        return marker is None or marker.evaluate(self.environment | {"extra": extra})


class Wheelhouse:
    """A directory of wheels whose hashes were verified."""

    def __init__(self, directory: Path, own: Path) -> None:
        """Use *directory*. *own* is the agent's wheel."""
        self.directory = directory
        self.own = own

    def fetch(self, locked: Sequence[Locked], target: Target) -> None:
        """Download the wheels in *locked* that *target* needs, and verify their hashes.

        Skip existing wheels.
        """
        its_own = [one for one in locked if one.name not in LEFT_OUT and target.takes(one.marker)]
        wanted = [one for one in its_own if self.find(one.pin, target) is None]
        if not wanted:
            return
        with tempfile.TemporaryDirectory() as name:
            lines = Path(name, "requirements.txt")
            # pip would evaluate the markers for the Python version that runs pip.
            lines.write_text("".join(replace(one, marker=None).line(one.hashes) for one in wanted), encoding="utf-8")
            platforms = [word for platform in target.platforms for word in ("--platform", platform)]
            subprocess.run(  # noqa: S603
                [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                 "--require-hashes", "--only-binary", ":all:", "--implementation", "cp", "--python-version",
                 target.python, *platforms, "--dest", self.directory, "--requirement", lines],
                check=True,
            )  # fmt: skip

    def find(self, pin: str, target: Target) -> Path | None:
        """Return the wheel of *pin* that runs on *target*, or None if it does not exist."""
        tags = target.tags()
        for path in sorted(self.directory.glob("*.whl")):
            name, version, _, own_tags = parse_wheel_filename(path.name)
            if f"{name}=={version}" == pin and own_tags & tags:
                return path
        return None

    def get(self, pin: str, target: Target) -> Path:
        """Return the wheel of *pin* that runs on *target*; stop the build if it is missing."""
        path = self.find(pin, target)
        if path is None:
            raise SystemExit(f"There is no wheel of {pin} for Python {target.python} on {target.machine}.")
        return path


def read_lock(path: Path) -> list[Locked]:
    """Return the requirements in a file that `uv pip compile --generate-hashes` wrote."""
    entries = re.findall(r"(?m)^([a-z0-9][^\n]*?)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", path.read_text("utf-8"))
    found = []
    for head, hashes in entries:
        requirement = Requirement(head)
        (pin,) = requirement.specifier
        digests = frozenset(re.findall(r"sha256:([0-9a-f]{64})", hashes))
        found.append(Locked(canonicalize_name(requirement.name), pin.version, requirement.marker, digests))
    return found


@cache
def requirements_of(wheel: Path) -> list[Requirement]:
    """Return the requirements of *wheel*."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        said = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    return [Requirement(line) for line in said]


def needed(house: Wheelhouse, locked: Sequence[Locked], target: Target, extras: Iterable[str]) -> set[Path]:
    """Return the wheels of the agent, of *extras*, and of all their dependencies on *target*."""
    pins = {one.name: one.pin for one in locked if target.takes(one.marker)}
    found: set[Path] = {house.own}
    todo = [(house.own, extra) for extra in ("", *extras)]
    done = set(todo)
    while todo:
        wheel, extra = todo.pop()
        for requirement in requirements_of(wheel):
            name = canonicalize_name(requirement.name)
            if name in LEFT_OUT or not target.takes(requirement.marker, extra):
                continue
            path = house.get(pins[name], target)
            found.add(path)
            more = [(path, word) for word in ("", *requirement.extras) if (path, word) not in done]
            done.update(more)
            todo += more
    return found


def needed_by_all(house: Wheelhouse, locked: Sequence[Locked], targets: Sequence[Target], *extras: str) -> set[Path]:
    """Return the wheels that the agent with *extras* needs on any of *targets*."""
    return {path for target in targets for path in needed(house, locked, target, extras)}


def sha256(path: Path) -> str:
    """Return the SHA-256 digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def requirements(wheels: Collection[Path], locked: Sequence[Locked], own: Path) -> str:
    """Return a requirements file that contains only *wheels*, with their markers and hashes."""
    of_pin: dict[str, set[str]] = {}
    for path in wheels:
        name, version, _, _ = parse_wheel_filename(path.name)
        of_pin.setdefault(f"{name}=={version}", set()).add(sha256(path))
    lines = [one.line(of_pin[one.pin]) for one in locked if one.pin in of_pin]
    if own in wheels:
        name, version, _, _ = parse_wheel_filename(own.name)
        lines.append(Locked(name, str(version), None, frozenset()).line([sha256(own)]))
    return "".join(sorted(lines))


def lay_out(directory: Path, extras: Path, house: Wheelhouse, arch: str) -> None:
    """Write the main archive's files to *directory*, and the extras archive's to *extras*."""
    locked, tools = read_lock(HERE / "requirements.txt"), read_lock(HERE / "tools.txt")
    targets = [Target(python, MACHINES[arch]) for python in PYTHONS]
    for target in targets:
        house.fetch(locked, target)
    base = needed_by_all(house, locked, targets)
    small = needed_by_all(house, locked, targets, *SMALL_EXTRAS)
    put(directory / "wheels", small)
    put(extras / "wheels", needed_by_all(house, locked, targets, *LARGE_EXTRAS) - small)
    write(directory / "requirements.txt", requirements(base, locked, house.own))
    for extra in (*SMALL_EXTRAS, *LARGE_EXTRAS):
        where = directory if extra in SMALL_EXTRAS else extras
        more = needed_by_all(house, locked, targets, extra) - base
        write(where / f"requirements-{extra}.txt", requirements(more, locked, house.own))
    pip = [one for one in tools if one.name == "pip"]
    pips = Wheelhouse(directory / "pip", house.own)
    pips.directory.mkdir()
    pips.fetch(pip, targets[0])
    for path in sorted(SYSTEMD.iterdir()):
        if path.is_file():
            shutil.copy(path, directory)
    shutil.copy(ROOT / "LICENSE", directory)
    version = parse_wheel_filename(house.own.name)[1]
    write(directory / "built-for", f"version={version}\nmachine={MACHINES[arch]}\npythons='{' '.join(PYTHONS)}'\n")


def lay_out_windows(directory: Path, house: Wheelhouse) -> None:
    """Write the files of the Windows archive to *directory*."""
    locked = read_lock(HERE / "requirements.txt")
    targets = [Target(python, AMD64) for python in PYTHONS]
    for target in targets:
        house.fetch(locked, target)
    (service,) = (one.pin for one in locked if one.name == "pywin32")
    base = needed_by_all(house, locked, targets) | {house.get(service, target) for target in targets}
    extras = {extra: needed_by_all(house, locked, targets, extra) for extra in (*SMALL_EXTRAS, *LARGE_EXTRAS)}
    put(directory / "wheels", base.union(*extras.values()))
    write(directory / "requirements.txt", requirements(base, locked, house.own))
    for extra, wheels in extras.items():
        write(directory / f"requirements-{extra}.txt", requirements(wheels - base, locked, house.own))
    for path in (ROOT / "LICENSE", *WINDOWS.glob("*.ps1"), *WINDOWS.glob("*.py"), *WINDOWS.glob("*.toml")):
        shutil.copy(path, directory)


def write_shell_files(share: Path, own: Path, epoch: int) -> None:
    """Generate the manual page and the shell completions from the agent's commands."""
    locked = read_lock(HERE / "requirements.txt")
    here = Target("{}.{}".format(*sys.version_info), platform.machine())
    with tempfile.TemporaryDirectory() as name:
        wheels, libraries = Path(name, "wheels"), Path(name, "libraries")
        wheels.mkdir()
        house = Wheelhouse(wheels, Path(shutil.copy(own, wheels)))
        house.fetch(locked, here)
        for wheel in needed(house, locked, here, ()):
            shutil.unpack_archive(wheel, libraries, "zip")
        program = [sys.executable, "-I", "-B", HERE / "shell_files.py", libraries, share, str(epoch)]
        subprocess.run(program, check=True)  # noqa: S603


def put(directory: Path, wheels: Iterable[Path]) -> None:
    """Copy *wheels* into a new directory."""
    directory.mkdir(parents=True)
    for path in wheels:
        shutil.copy(path, directory)


def write(path: Path, text: str) -> None:
    """Write *text* to a file of the archive."""
    path.write_text(text, encoding="utf-8")


def pack(directory: Path, archive: Path, epoch: int) -> None:
    """Pack *directory* into a reproducible tar.gz archive."""
    with (
        archive.open("wb") as file,
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=epoch) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.GNU_FORMAT) as tar,
    ):
        for path in [directory, *sorted(directory.rglob("*"))]:
            member = tar.gettarinfo(path, str(path.relative_to(directory.parent)))
            member.uid = member.gid = 0
            member.uname = member.gname = "root"
            member.mtime = epoch
            member.mode = 0o755 if path.is_dir() or path.suffix == ".sh" else 0o644
            if path.is_dir():
                tar.addfile(member)
            else:
                with path.open("rb") as content:
                    tar.addfile(member, content)


def pack_zip(directory: Path, archive: Path, epoch: int) -> None:
    """Pack *directory* into a reproducible zip archive."""
    when = datetime.fromtimestamp(epoch, timezone.utc).timetuple()[:6]
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for path in sorted(path for path in directory.rglob("*") if path.is_file()):
            member = zipfile.ZipInfo(path.relative_to(directory.parent).as_posix(), when)
            member.compress_type = zipfile.ZIP_STORED if path.suffix == ".whl" else zipfile.ZIP_DEFLATED
            member.external_attr = 0o644 << 16
            packed.writestr(member, path.read_bytes())


def build_windows(own: Path, out: Path, epoch: int) -> Path:
    """Build the Windows archive in *out*, and return its path."""
    version = parse_wheel_filename(own.name)[1]
    with tempfile.TemporaryDirectory() as name:
        directory, wheels = Path(name, f"{NAME}-{version}-windows-x86_64"), Path(name, "wheels")
        for path in (directory, wheels):
            path.mkdir()
        lay_out_windows(directory, Wheelhouse(wheels, Path(shutil.copy(own, wheels))))
        archive = out / f"{directory.name}.zip"
        pack_zip(directory, archive, epoch)
    return archive


def build(own: Path, share: Path, out: Path, arch: str, epoch: int, *, kinds: Iterable[str]) -> list[Path]:
    """Build the Linux archives and packages for *arch* in *out*, and return their paths.

    *share* is the directory that `write_shell_files` wrote.
    """
    version = parse_wheel_filename(own.name)[1]
    made = []
    with tempfile.TemporaryDirectory() as name:
        whole, extras = (Path(name, kind, f"{NAME}-{version}-linux-{arch}") for kind in ("whole", "extras"))
        for directory in (whole, extras, Path(name, "wheels")):
            directory.mkdir(parents=True)
        house = Wheelhouse(Path(name, "wheels"), Path(shutil.copy(own, Path(name, "wheels"))))
        lay_out(whole, extras, house, arch)
        shutil.copytree(share, whole / "share")
        for directory, kind in ((whole, NAME), (extras, f"{NAME}-extras")):
            made.append(out / f"{kind}-{version}-linux-{arch}.tar.gz")
            pack(directory, made[-1], epoch)
        package = packages.Package(
            tree=whole, version=str(version), machine=MACHINES[arch], pythons=PYTHONS, epoch=epoch
        )
        made += [package.make(kind, out) for kind in kinds]
    return made


def main() -> None:
    """Build the requested archives, and print their digests and sizes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--wheel", type=Path, required=True, help="the agent's wheel")
    parser.add_argument("--out", type=Path, default=Path("dist"), help="the directory of the archives (dist)")
    choices = (*MACHINES, "windows")
    parser.add_argument("--arch", action="append", choices=choices, help="build only this target (all)")
    parser.add_argument("--package", action="append", choices=packages.KINDS, help="also build this package (none)")
    asked = parser.parse_args()
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or DEFAULT_EPOCH)
    asked.out.mkdir(parents=True, exist_ok=True)
    own, out = asked.wheel.resolve(), asked.out.resolve()
    with tempfile.TemporaryDirectory() as share:
        made = []
        write_shell_files(Path(share), own, epoch)
        for arch in asked.arch or choices:
            if arch == "windows":
                made.append(build_windows(own, out, epoch))
            else:
                made += build(own, Path(share), out, arch, epoch, kinds=asked.package or ())
        for path in made:
            sys.stdout.write(f"{sha256(path)}  {path.stat().st_size / 1e6:5.1f} MB  {path.name}\n")


if __name__ == "__main__":
    main()
