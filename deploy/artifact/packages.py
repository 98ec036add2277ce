# ruff: noqa: INP001
"""Builds the .deb and .rpm packages from the files of the Linux archive.

A package installs the archive's files in /usr/lib, and its scripts run install.sh. The installation does not use a
package index, verifies the hash of every wheel, and restores the previous version if an upgrade fails.

The configuration file is not part of the package. The installer creates the file only if it does not exist. Upgrades do
not change the file, and a purge deletes it.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent / "package"
INSTALLER = HERE.parents[1] / "systemd/install.sh"
NAME = "scheduled-events-bridge"
KINDS = ("deb", "rpm")
#: Maps the architecture names of the kernel and of RPM to the names of Debian.
DEBIAN = {"x86_64": "amd64", "aarch64": "arm64"}
#: The size of the virtual environment that the installer creates in /opt.
_UNPACKED_KILOBYTES = 46_000
SUMMARY = "Forwards Azure scheduled events from this VM"


@dataclass(frozen=True, kw_only=True)
class Package:
    """The content and the metadata of one package."""

    tree: Path
    """The directory with the files of the archive."""
    version: str
    machine: str
    """The architecture, as `uname -m` prints it."""
    pythons: Sequence[str]
    epoch: int
    """The modification time of every file in the package, in Unix seconds."""

    @property
    def own_version(self) -> str:
        """Return the version with a tilde.

        dpkg and rpm then sort a release candidate before its release.
        """
        return re.sub(r"\.?(?=(?:a|b|rc|dev)\d)", "~", self.version)

    def make(self, kind: str, out: Path) -> Path:
        """Build the package in the directory *out*, and return its path."""
        with tempfile.TemporaryDirectory() as name:
            root = Path(name, "root")
            self._lay_out(kind, root)
            return self._make_deb(root, out) if kind == "deb" else self._make_rpm(root, out, Path(name))

    def _lay_out(self, kind: str, root: Path) -> None:
        """Write the files that the package installs to *root*."""
        own = root / "usr/lib" / NAME
        shutil.copytree(self.tree, own, ignore=shutil.ignore_patterns("share"))
        with (own / "built-for").open("a", encoding="utf-8") as file:
            file.write(f"package={kind}\n")
        shutil.copytree(self.tree / "share", root / "usr/share")
        manual = root / f"usr/share/man/man1/{NAME}.1"
        manual.with_name(f"{manual.name}.gz").write_bytes(gzip.compress(manual.read_bytes(), mtime=0))
        manual.unlink()
        if kind == "deb":
            (root / "usr/share/zsh/site-functions").rename(root / "usr/share/zsh/vendor-completions")
        license_file = root / ("usr/share/doc" if kind == "deb" else "usr/share/licenses") / NAME
        license_file.mkdir(parents=True)
        shutil.copy(self.tree / "LICENSE", license_file / ("copyright" if kind == "deb" else "LICENSE"))
        command = root / "usr/bin" / NAME
        command.parent.mkdir()
        command.symlink_to(f"/opt/{NAME}/venv/bin/{NAME}")
        for path in [root, *root.rglob("*")]:
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() or path.suffix == ".sh" else 0o644)

    def _make_deb(self, root: Path, out: Path) -> Path:
        files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
        control = root / "DEBIAN"
        control.mkdir(mode=0o755)
        kilobytes = sum(path.stat().st_size for path in files) // 1024 + _UNPACKED_KILOBYTES
        text = {
            "control": self._control(kilobytes),
            "md5sums": "".join(f"{md5(path)}  {path.relative_to(root)}\n" for path in files),
            "triggers": "interest-noawait /usr/bin/python3\n",
        }
        for name, content in text.items():
            (control / name).write_text(content, encoding="utf-8")
            (control / name).chmod(0o644)
        for name in ("postinst", "prerm", "postrm"):
            script = (HERE / name).read_text(encoding="utf-8")
            script = script.replace("@INSTALLER@\n", INSTALLER.read_text(encoding="utf-8"))
            (control / name).write_text(script, encoding="utf-8")
            (control / name).chmod(0o755)
        package = out / f"{NAME}_{self.own_version}_{DEBIAN[self.machine]}.deb"
        # gzip gives the same bytes on every machine, and the wheels are already compressed.
        run(["dpkg-deb", "--root-owner-group", "-Zgzip", "--build", root, package], self.epoch)
        return package

    def _control(self, kilobytes: int) -> str:
        """Return the control file of the .deb package."""
        oldest, (major, minor) = self.pythons[0], map(int, self.pythons[-1].split("."))
        return (
            f"Package: {NAME}\n"
            f"Version: {self.own_version}\n"
            f"Architecture: {DEBIAN[self.machine]}\n"
            "Maintainer: The Scheduled Events Bridge authors\n"
            f"Installed-Size: {kilobytes}\n"
            f"Depends: python3 (>= {oldest}), python3 (<< {major}.{minor + 1}), systemd, passwd\n"
            "Section: admin\n"
            "Priority: optional\n"
            f"Description: {SUMMARY}\n"
            " The agent polls an Azure VM's Scheduled Events once a second and forwards every\n"
            " change as a record. The package contains all required libraries. Its scripts run the\n"
            " installer of the archive, which restores the previous version if an upgrade\n"
            " fails.\n"
        )

    def _make_rpm(self, root: Path, out: Path, work: Path) -> Path:
        pythons = " or ".join(f"python(abi) = {python}" for python in self.pythons)
        macros = {
            "_topdir": work / "rpm",
            "_rpmdir": out,
            "_build_name_fmt": "%{NAME}-%{VERSION}-%{RELEASE}.%{ARCH}.rpm",
            "tree": root,
            "agent_version": self.own_version,
            "pythons": f"({pythons})",
            # Do not compile, strip, or compress the files again.
            "__os_install_post": "%{nil}",
            "debug_package": "%{nil}",
            "_build_id_links": "none",
            # Reproducible settings that rpm 4.12 and later can read.
            "_binary_payload": "w6.gzdio",
            "_binary_filedigest_algorithm": "8",
            "_source_filedigest_algorithm": "8",
            "_buildhost": "localhost",
            "use_source_date_epoch_as_buildtime": "1",
            "clamp_mtime_to_source_date_epoch": "1",
        }
        words = [word for name, value in macros.items() for word in ("--define", f"{name} {value}")]
        spec = HERE / f"{NAME}.spec"
        run(["rpmbuild", "-bb", "--quiet", "--target", f"{self.machine}-linux", *words, spec], self.epoch)
        return out / f"{NAME}-{self.own_version}-1.{self.machine}.rpm"


def md5(path: Path) -> str:
    """Return the MD5 digest, the only digest that `dpkg --verify` supports.

    It detects only accidental changes.
    """
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def run(command: Sequence[object], epoch: int) -> None:
    """Run a packaging program. If it fails, exit with its output."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}
    done = subprocess.run(  # noqa: S603
        [str(word) for word in command], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{command[0]} failed with exit code {done.returncode}: {done.stdout}{done.stderr}")
