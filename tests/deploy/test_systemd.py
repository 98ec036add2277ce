"""The unit, its drop-ins, and the installer, checked by the systemd tools and installed into a temporary root."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import doc_pages
import pytest
from unit_file import exposure, findings, settings_of

NAME = "scheduled-events-bridge"
UNIT = f"{NAME}.service"

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(600)]

DEPLOY = Path(__file__).parents[2] / "deploy"

OPT = f"/opt/{NAME}"

DROP_INS = {"none": [], "credentials": ["credentials.conf"], "command-sink": ["command-sink.conf"]}

MOST_EXPOSURE = 2.0

#: How far the clock of a VM may jump after a freeze.
FREEZE_SECONDS = 60

#: Azure's notice of a Preempt.
EVICTION_NOTICE_SECONDS = 30

#: The first systemd with RestartSteps=.
STEPS_SINCE = 254


@pytest.fixture(scope="module")
def unit(deploy):
    return settings_of(deploy / "systemd" / UNIT)


class Tree:
    """A directory that the installer uses as the root of the machine."""

    def __init__(self, root, installer, source, environment, python):
        self.root = root
        self._python = python
        self._installer = installer
        self._source = source
        self.environment = environment

    def install(self, *more):
        """Run the installer and return the completed process."""
        return subprocess.run(
            [self._installer, "--root", self.root, "--python", self._python, *more, self._source],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    @property
    def config(self):
        return self.root / f"etc/{NAME}/config.toml"

    @property
    def link(self):
        return self.root / f"opt/{NAME}/venv"

    @property
    def versions(self):
        return {path.name for path in (self.root / f"opt/{NAME}/venvs").iterdir()}

    def run(self, *arguments):
        """Run the installed command, whose paths start with /opt."""
        return self.run_python(self.link / f"bin/{NAME}", *arguments)

    def run_python(self, *arguments):
        """Run the tree's Python."""
        command = [self.link / "bin/python", "-I", *arguments]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def tree(package_source, clean_environment, service_python, tool, tmp_path_factory):
    tool("systemctl")
    tool("systemd-sysusers")
    root = tmp_path_factory.mktemp("systemd") / "root"
    made = Tree(root, DEPLOY / "systemd/install.sh", package_source, clean_environment, service_python)
    done = made.install()
    assert done.returncode == 0, done.stderr
    return made


def read_by_systemd(tool, tree, directory, drop_ins):
    """Return the exit code and findings of systemd-analyze for the installed unit with *drop_ins*, name -> text."""
    installed = tree.root / f"etc/systemd/system/{UNIT}"
    # systemd-analyze checks that the programs of the unit exist, so the paths must point into the tree
    (directory / f"{UNIT}.d").mkdir(parents=True)
    (directory / UNIT).write_text(installed.read_text().replace(OPT, f"{tree.root}{OPT}"))
    for name, text in drop_ins.items():
        (directory / f"{UNIT}.d" / name).write_text(text)
    return findings(tool("systemd-analyze"), directory / UNIT)


@pytest.mark.parametrize("drop_ins", DROP_INS.values(), ids=DROP_INS)
def test_systemd_analyze_accepts_the_unit(tool, deploy, tree, tmp_path, drop_ins):
    texts = {name: (deploy / "systemd" / name).read_text() for name in drop_ins}
    assert read_by_systemd(tool, tree, tmp_path, texts) == (0, "")


def test_systemd_analyze_accepts_the_file_sink_drop_in(tool, tree, tmp_path):
    shown = doc_pages.marked(doc_pages.page("docs/reference/sinks.md"), "unit: logs directory")
    assert read_by_systemd(tool, tree, tmp_path, {"file.conf": shown}) == (0, "")


@pytest.mark.parametrize("drop_ins", [[], ["credentials.conf"]], ids=["alone", "credentials"])
def test_sandbox_exposure_level_is_low(tool, deploy, tmp_path, drop_ins):
    shutil.copy(deploy / "systemd" / UNIT, tmp_path)
    (tmp_path / f"{UNIT}.d").mkdir()
    for name in drop_ins:
        shutil.copy(deploy / "systemd" / name, tmp_path / f"{UNIT}.d")
    assert exposure(tool("systemd-analyze"), tmp_path / UNIT) <= MOST_EXPOSURE


def test_watchdog_timeout_exceeds_the_freeze_of_a_vm(unit):
    assert float(unit["WatchdogSec"][0]) >= 2 * FREEZE_SECONDS


def systemd_version(tool):
    said = subprocess.run([tool("systemctl"), "--version"], capture_output=True, text=True, timeout=60, check=True)
    return int(said.stdout.split()[1])


def test_installer_adds_restart_backoff_if_systemd_supports_it(tree, tool, tmp_path, monkeypatch):
    steps = tree.root / f"etc/systemd/system/{UNIT}.d/10-restart-steps.conf"
    assert steps.is_file() is (systemd_version(tool) >= STEPS_SINCE)
    newer = tmp_path / "systemctl"
    say_version = f'[ "$1" != --version ] || {{ echo "systemd {STEPS_SINCE}.5"; exit; }}'
    newer.write_text(f'#!/bin/sh\n{say_version}\nexec {tool("systemctl")} "$@"\n')
    newer.chmod(0o755)
    monkeypatch.setitem(tree.environment, "PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert tree.install().returncode == 0
    assert float(settings_of(steps)["RestartMaxDelaySec"][0]) <= EVICTION_NOTICE_SECONDS / 2

    (tmp_path / "steps.service").write_text("[Service]\nExecStart=/bin/true\nRestart=always\nRestartSec=5\n")
    shutil.copytree(steps.parent, tmp_path / "steps.service.d")
    _, said = findings(tool("systemd-analyze"), tmp_path / "steps.service")
    unknown = ["RestartSteps", "RestartMaxDelaySec"] if systemd_version(tool) < STEPS_SINCE else []
    assert re.findall(r"Unknown key '(\w+)'", said) == unknown, said


def test_unit_restarts_without_a_limit(unit):
    assert unit["Restart"] == ["always"]
    assert unit["StartLimitIntervalSec"] == ["0"]
    assert "RestartPreventExitStatus" not in unit


def test_examples_in_the_configuration_are_valid_when_uncommented(tree, tmp_path):
    examples = re.sub(r"(?m)^# (?=\[|[a-z_]+ = )", "", tree.config.read_text())
    assert examples.count("[[sinks]]") == 3
    (tmp_path / "config.toml").write_text(examples)
    done = tree.run("check-config", "--config", tmp_path / "config.toml")
    # 1: the secret is not on this machine; 78 would be a wrong configuration
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("\nProblem: ") == 1
    assert "webhook-secret" in done.stdout


def test_upgrade_keeps_configuration_drop_ins_and_the_previous_version(tree):
    drop_in = tree.root / f"etc/systemd/system/{UNIT}.d/mine.conf"
    drop_in.parent.mkdir(exist_ok=True)
    drop_in.write_text("[Service]\nMemoryMax=1G\n")
    text = 'labels = { team = "payments" }\n'
    tree.config.write_text(text)
    first = tree.link.resolve()
    done = tree.install()
    assert done.returncode == 0
    assert f"ln -sfn venvs/{first.name} {OPT}/venv && systemctl restart {NAME}\n" in done.stdout
    second = tree.link.resolve()
    assert tree.versions == {first.name, second.name}
    assert tree.install().returncode == 0
    assert tree.versions == {second.name, tree.link.resolve().name}
    assert tree.config.read_text() == text
    assert drop_in.exists()


def test_python_hidden_by_the_sandbox_is_rejected(tree, service_python, tmp_path):
    versions, linked = tree.versions, tree.link.resolve()
    hidden = tmp_path / "bin/python3"  # the service has a private /tmp
    hidden.parent.mkdir()
    shutil.copy(service_python.resolve(), hidden)
    done = tree.install("--python", hidden)
    assert done.returncode == 1
    assert f"{hidden} is in {hidden}, which the service cannot read" in done.stderr
    assert (tree.versions, tree.link.resolve()) == (versions, linked)
