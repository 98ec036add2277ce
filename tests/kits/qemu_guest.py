"""A Linux guest in QEMU without KVM, whose only program is a Python file, and which can be paused in two ways.

The guest runs from memory: the kernel in $GUEST_KERNEL, and a file system with this interpreter, its libraries, and the
packages that the program imports. The serial port carries its standard input and output.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

QEMU = "qemu-system-x86_64"
_INIT = """#!/usr/bin/python3
import os, subprocess, sys
sys.path.insert(0, "/packages")
import ctypes, tty
for kind, where in (("proc", "/proc"), ("devtmpfs", "/dev"), ("sysfs", "/sys")):
    ctypes.CDLL(None).mount(kind.encode(), where.encode(), kind.encode(), 0, None)
serial = os.open("/dev/ttyS0", os.O_RDWR)
tty.setraw(serial)
for descriptor in range(3):
    os.dup2(serial, descriptor)
exec(compile(open("/program.py").read(), "/program.py", "exec"))
"""


def why_not() -> str | None:
    """Return the reason why no guest can run here, or None."""
    if shutil.which(QEMU) is None:
        return f"{QEMU} is not installed (Debian: qemu-system-x86)"
    if not Path(os.environ.get("GUEST_KERNEL", "")).is_file():
        return "GUEST_KERNEL is not the file of a kernel, such as vmlinuz of Debian's linux-image-cloud-amd64"
    return None


class Guest:
    """A guest that runs the Python source *program* with the import directories *packages*."""

    def __init__(self, directory: Path, program: str, packages: Iterable[Path]) -> None:
        archive = directory / "initramfs"
        with archive.open("wb") as file:
            for number, (name, mode, content) in enumerate(_files(program, packages), 1):
                _add(file, number, name, mode, content)
            _add(file, 0, "TRAILER!!!", 0, b"")
        self._serial, theirs = socket.socketpair()
        self._qmp, qmp = socket.socketpair()
        command: list[str | Path] = [
            *(QEMU, "-accel", "tcg", "-cpu", "max", "-m", "512", "-display", "none", "-no-reboot", "-nodefaults"),
            *("-kernel", os.environ["GUEST_KERNEL"], "-initrd", archive),
            *("-append", "console=ttyS0 quiet panic=-1 random.trust_cpu=on rdinit=/init"),
            *(
                "-chardev",
                f"socket,id=serial,fd={theirs.fileno()}",
                "-serial",
                "chardev:serial",
                "-chardev",
                f"socket,id=qmp,fd={qmp.fileno()}",
                "-mon",
                "qmp,mode=control",
            ),
        ]
        self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(), qmp.fileno()))
        theirs.close()
        qmp.close()
        self._lines = self._serial.makefile("rw", encoding="utf-8", newline="\n")
        self._answers = self._qmp.makefile("rw", encoding="utf-8")
        self._answers.readline()
        self._ask("qmp_capabilities")

    def read(self) -> str:
        """Return the next line of the program."""
        self._serial.settimeout(240)
        return self._lines.readline().strip()

    def write(self, line: str) -> None:
        """Send a line to the program."""
        self._lines.write(f"{line}\n")
        self._lines.flush()

    def pause_with_clocks(self, seconds: float) -> None:
        """Pause the guest and its clocks, like a hypervisor that saves and restores a VM."""
        self._ask("stop")
        time.sleep(seconds)
        self._ask("cont")

    def pause_without_clocks(self, seconds: float) -> None:
        """Pause the guest while its clocks run, like a busy host."""
        self._process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Stop the guest."""
        self._process.kill()
        self._process.wait()
        for each in (self._lines, self._answers, self._serial, self._qmp):
            each.close()

    def _ask(self, command: str) -> None:
        self._answers.write(json.dumps({"execute": command}) + "\n")
        self._answers.flush()
        while "return" not in (answer := json.loads(self._answers.readline())):
            assert "error" not in answer, answer


def _files(program: str, packages: Iterable[Path]) -> Iterator[tuple[str, int, bytes]]:
    """Yield the name, mode, and content of each file and directory of the guest."""
    interpreter = Path(sys.executable).resolve()
    library = Path(os.__file__).parent
    found = {"init": _INIT.encode(), "program.py": program.encode(), "usr/bin/python3": interpreter.read_bytes()}
    compiled = [interpreter, *(library / "lib-dynload").glob("*.so")]
    for path in library.rglob("*.py"):
        if not {"test", "tests", "site-packages", "idlelib", "lib2to3", "ensurepip"} & set(path.parts):
            found[f"usr/lib/{library.name}/{path.relative_to(library)}"] = path.read_bytes()
    for path in compiled[1:]:
        found[f"usr/lib/{library.name}/lib-dynload/{path.name}"] = path.read_bytes()
    for package in packages:
        for path in package.rglob("*"):
            if path.suffix in {".py", ".so"}:
                found[f"packages/{package.name}/{path.relative_to(package)}"] = path.read_bytes()
                compiled += [path] if path.suffix == ".so" else []
    for path in _shared_libraries(compiled):
        found[str(path).lstrip("/")] = path.read_bytes()
    directories = {str(parent) for name in found for parent in Path(name).parents} | {"proc", "dev", "sys"}
    yield from ((name, 0o40755, b"") for name in sorted(directories - {"."}))
    yield from ((name, 0o100755, content) for name, content in found.items())


def _shared_libraries(programs: Iterable[Path]) -> set[Path]:
    listed = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False).stdout
    found = {Path(word) for word in listed.split() if word.startswith("/") and not word.endswith(":")}
    libc = next(path for path in found if path.name.startswith("libc.so"))
    return {*found, libc.with_name("libgcc_s.so.1")}  # the C library loads it at the end of a thread


def _add(file: IO[bytes], number: int, name: str, mode: int, content: bytes) -> None:
    """Append a file in the format of cpio(5), "newc"."""
    fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
    for part in (head, content):
        file.write(part + bytes(-len(part) % 4))
