"""Machines that Ansible manages, each a bare Debian with its own systemd and network."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

DEPLOY_TESTS = Path(__file__).parents[1] / "deploy"
SSH = DEPLOY_TESTS / "ansible/ssh.sh"
NAME = "scheduled-events-bridge"
ROLE = "scheduled_events_bridge"
ETC = f"/etc/{NAME}"
SECRET = "what-nobody-may-read"
STDOUT = '[[sinks]]\ntype = "stdout"\n'
#: The configurations of the machines, by file name.
CONFIGURATIONS = {
    "good": f'{STDOUT}[[sinks]]\ntype = "webhook"\nurl = "http://127.0.0.1:9/"\nbearer_token_file = "{ETC}/token"\n'
    'transitions = ["canceled"]\n',
    "never-ready": f'{STDOUT}[imds]\nendpoint = "http://127.0.0.1:1"\n',
    "refused": "no_such_key = 1\n",
    "refusing-sink": f'{STDOUT}[[sinks]]\ntype = "webhook"\nname = "refusing"\nurl = "http://169.254.169.254/hook"\n',
    "refusing-sink-never-ready": f'{STDOUT}[[sinks]]\ntype = "webhook"\nname = "refusing"\n'
    'url = "http://169.254.169.254/hook"\n[imds]\nendpoint = "http://127.0.0.1:1"\n',
}
#: The wait for a machine with never-ready, and for its previous version after the rollback, which needs as long.
SECONDS_IN_VAIN = 20


class Done(NamedTuple):
    """The result of a playbook: its exit code, its output, and the recap figures of each host."""

    code: int
    said: str
    recap: dict[str, dict[str, int]]

    def total(self, figure: str) -> int:
        return sum(figures[figure] for figures in self.recap.values())


class Fleet:
    """Machines with an inventory. *archives* has two versions, and *goods* the files for ansible/drive.sh."""

    def __init__(
        self, directory: Path, playbooks: Path, archives: Path, *, bare: str | None = None, goods: Path | None = None
    ) -> None:
        self.directory, self.playbooks, self.archives = directory, playbooks, archives
        self.bare, self.goods = bare, goods
        self.names: list[str] = []
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for name, text in CONFIGURATIONS.items():
            (directory / f"{name}.toml").write_text(text)

    def start(self, name: str, *, with_version_before: bool) -> None:
        """Start to boot a machine, without waiting."""
        assert self.bare
        assert self.goods
        place = self.directory / name
        self.names.append(name)
        (place / "results").mkdir(parents=True)
        (place / "goods").symlink_to(self.goods)
        if with_version_before:
            (place / "results/with-version-before").touch()
        with (place / "console").open("wb") as console:
            self.processes[name] = subprocess.Popen(
                ["bash", DEPLOY_TESTS / "systemd/boot.sh", "none", place], env={**os.environ, "BASE": self.bare},
                stdout=console, stderr=console, start_new_session=True,
            )  # fmt: skip

    def wait_until_up(self) -> None:
        """Wait for all machines, and record the process 1 of each."""
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
        hierarchy = next(where for _, where, kind, *_ in mounts if kind == "cgroup2")
        for name, process in self.processes.items():
            place = self.directory / name
            wait_for((place / "results/up").exists, otherwise=(place / "console").read_text)
            group = Path(hierarchy, f"bridge-test-{process.pid}", "init.scope/cgroup.procs")
            (place / "pid").write_text(group.read_text().split()[0])

    def wait_until_ready(self, *names: str) -> None:
        """Wait for the agents of these machines."""
        for name in names:
            wait_for(partial(self._is_ready, name), otherwise=partial(self.on, name, "journalctl -n 20"))

    def wait_until_not_ready(self, name: str) -> None:
        """Wait until the agent reports a failing sink."""
        wait_for(lambda: self.readyz(name)[0] == 503, otherwise=partial(self.on, name, "journalctl -n 20"))

    def configure(self, name: str, config: str) -> None:
        """Replace the configuration of a machine, and restart its agent."""
        self.on(name, f"printf %s {shlex.quote(CONFIGURATIONS[config])} >{ETC}/config.toml; systemctl restart {NAME}")

    def announce(self, name: str) -> None:
        """Make the machine's metadata service announce an event."""
        body = '{"event_type": "Freeze", "event_source": "Platform"}'
        ask = f"import urllib.request as u; u.urlopen('http://169.254.169.254/control/events', b'{body}')"
        self.on(name, f"python3 -c {shlex.quote(ask)}")

    def _is_ready(self, name: str) -> bool:
        return self.readyz(name)[0] == 200

    def stop(self, *names: str) -> None:
        """End these machines, or all."""
        ended = names or self.names
        for name in ended:
            (self.directory / name / "results/down").touch()
        for name in ended:
            process = self.processes[name]
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def on(self, name: str, command: str) -> str:
        """Return what *command* prints on a machine."""
        done = subprocess.run(
            [SSH, name, command], env={**os.environ, "MACHINES": str(self.directory)},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        return done.stdout.strip()

    def readyz(self, name: str) -> tuple[int, str]:
        """Return the status of /readyz and the version, or (0, "") without a response."""
        ask = (
            "import json, urllib.request as u\n"
            "try: a = u.urlopen('http://127.0.0.1:9464/readyz')\n"
            "except u.HTTPError as e: a = e\n"
            "print(json.dumps([a.status, json.load(a)['version']]))"
        )
        status, version = json.loads(self.on(name, f"python3 -c {shlex.quote(ask)} 2>/dev/null") or '[0, ""]')
        return status, version

    def state(self, name: str) -> tuple[str, str]:
        """Return the size, mode, and time of every file of the agent and the settings, and the agent's process."""
        files = self.on(name, "find /opt /etc /usr/local -printf '%p %s %m %T@\\n' | sort; ls -A /tmp")
        return files, self.on(name, f"systemctl show {NAME} -p MainPID")

    def play(
        self,
        line: Sequence[str],
        version: str,
        *more: str,
        config: str = "good",
        of_host: Mapping[str, str] | None = None,
    ) -> Done:
        """Run a command of the page with the arguments *more*. *of_host* maps hosts to other configurations."""
        of_host = of_host or {}
        configs = {name: of_host.get(name, config) for name in self.names}
        hosts = {
            name: {
                f"{ROLE}_config": str(self.directory / f"{config}.toml"),
                f"{ROLE}_wait_seconds": SECONDS_IN_VAIN if config.endswith("never-ready") else 120,
            }
            for name, config in configs.items()
        }
        variables = {
            f"{ROLE}_version": version,
            f"{ROLE}_archives": str(self.archives),
            f"{ROLE}_secrets": {"token": SECRET},
            "ansible_user": "root",
            "ansible_python_interpreter": "/usr/bin/python3",
        }
        (self.playbooks / "inventory.yml").write_text(json.dumps({ROLE: {"hosts": hosts, "vars": variables}}))
        by_namespace = {
            "MACHINES": str(self.directory),
            "ANSIBLE_SSH_EXECUTABLE": str(SSH),
            "ANSIBLE_SSH_ARGS": "",
            "ANSIBLE_SSH_TRANSFER_METHOD": "piped",
            "ANSIBLE_PIPELINING": "1",
        }
        done = subprocess.run(
            [*line, *more], cwd=self.playbooks, env=environment(self.directory) | by_namespace,
            capture_output=True, text=True, timeout=900, check=False,
        )  # fmt: skip
        sys.stdout.write(f"$ {shlex.join([*line, *more])}\n{done.stdout}{done.stderr}\n")
        recap = {
            name: {key: int(figure) for key, figure in re.findall(r"(\w+)=(\d+)", figures)}
            for name, figures in re.findall(r"(?m)^(\S+) +: (ok=.*)$", done.stdout)
        }
        return Done(done.returncode, " ".join(done.stdout.split()), recap)


def environment(home: Path) -> dict[str, str]:
    """Return the environment of Ansible, with files below *home* and without the settings of this machine."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ANSIBLE_", "PYTHON"))}
    own = {"ANSIBLE_HOME": str(home), "ANSIBLE_NOCOLOR": "1", "NO_COLOR": "1", "LC_ALL": "C.UTF-8"}
    beside = f"{Path(sys.executable).parent}:{kept['PATH']}"  # ansible-lint calls ansible
    return {**kept, **own, "PATH": beside}


def wait_for(is_true: Callable[[], bool], *, otherwise: Callable[[], str], seconds: float = 180) -> None:
    """Wait until *is_true*, or fail with the message of *otherwise*."""
    until = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < until, otherwise()
        time.sleep(0.1)
