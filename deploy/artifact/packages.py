# ruff: noqa: INP001
"""Make the .deb and the .rpm of one kind of machine, from the tree of its archive.

A package holds the archive's tree in /usr/lib, and its scripts run install.sh there. So what holds for the archive
holds for a package: no index, every file by its hash, and no VM left worse than before. The configuration is nobody's
file: the installer writes it where there is none, an upgrade leaves it alone and asks nothing, a purge takes it.

Debian's dpkg-deb and rpmbuild make them. Nobody signs them here.
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
#: Debian's word for a machine, and that of RPM, which is the kernel's.
DEBIAN = {"x86_64": "amd64", "aarch64": "arm64"}
SUMMARY = "Forwards what Azure announces for this VM"


@dataclass(frozen=True, kw_only=True)
class Package:
    """What one package is made of."""

    tree: Path
    """The tree of the archive."""
    version: str
    machine: str
    """As `uname -m` says it."""
    pythons: Sequence[str]
    epoch: int
    """The time of every file in it, in seconds since 1970."""

    @property
    def own_version(self) -> str:
        """Return the version in the order of dpkg and rpm, where a release candidate is before its release."""
        return re.sub(r"\.?(?=(?:a|b|rc|dev)\d)", "~", self.version)

    def make(self, kind: str, out: Path) -> Path:
        """Make the package of *kind* in the directory *out* and return it."""
        with tempfile.TemporaryDirectory() as name:
            root = Path(name, "root")
            self._lay_out(kind, root)
            return self._make_deb(root, out) if kind == "deb" else self._make_rpm(root, out, Path(name))

    def _lay_out(self, kind: str, root: Path) -> None:
        """Put into *root* what the package puts on a machine."""
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
        kilobytes = sum(path.stat().st_size for path in files) // 1024 + 1
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
        # gzip: the wheels are compressed already, and the other compressors give other bytes with more threads.
        run(["dpkg-deb", "--root-owner-group", "-Zgzip", "--build", root, package], self.epoch)
        return package

    def _control(self, kilobytes: int) -> str:
        """Return the control file of a .deb."""
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
            " change as a record. The package brings all of its libraries; its scripts run\n"
            " the installer of the archive, which puts the version before back when this one\n"
            " does not work.\n"
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
            # As they are: nothing is compiled, stripped or compressed anew.
            "__os_install_post": "%{nil}",
            "debug_package": "%{nil}",
            "_build_id_links": "none",
            # What every rpm since 4.12 reads, and the same bytes each time.
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
    """Return what `dpkg --verify` compares; it knows no other digest, and guards against nothing but accidents."""
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def run(command: Sequence[object], epoch: int) -> None:
    """Run a program that packs, and show what it says when it fails."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}
    done = subprocess.run(  # noqa: S603
        [str(word) for word in command], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{command[0]} ended with {done.returncode}: {done.stdout}{done.stderr}")
