"""The unit, its drop-ins and the installer: read by systemd's own tools, and installed into a tree of its own."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import doc_pages
import pytest
from unit_file import settings_of

from bridge.config.loader import read

NAME = "scheduled-events-bridge"
UNIT = f"{NAME}.service"

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(600)]

DEPLOY = Path(__file__).parents[2] / "deploy"

OPT = f"/opt/{NAME}"

DROP_INS = {"none": [], "credentials": ["credentials.conf"], "command-sink": ["command-sink.conf"]}

MOST_EXPOSURE = 2.0

#: How far the clock of a frozen VM may jump when it goes on.
FREEZE_SECONDS = 60

#: Azure's notice of a Preempt.
EVICTION_NOTICE_SECONDS = 30

#: The first systemd with RestartSteps=.
STEPS_SINCE = 254


@pytest.fixture(scope="module")
def unit(deploy):
    return settings_of(deploy / "systemd" / UNIT)


class Tree:
    """A directory that the installer is told to take for the machine."""

    def __init__(self, root, installer, source, environment, python):
        self.root = root
        self._python = python
        self._installer = installer
        self._source = source
        self.environment = environment

    def install(self, *more):
        """Run the installer and return how it ended."""
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
        """Run the installed command, which believes that it lies in /opt."""
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
    """Return what systemd says of the installed unit with *drop_ins*, name -> text."""
    installed = tree.root / f"etc/systemd/system/{UNIT}"
    # systemd-analyze looks for the programs where the unit says, so that must be where the tree is
    (directory / f"{UNIT}.d").mkdir(parents=True)
    (directory / UNIT).write_text(installed.read_text().replace(OPT, f"{tree.root}{OPT}"))
    for name, text in drop_ins.items():
        (directory / f"{UNIT}.d" / name).write_text(text)
    done = subprocess.run(
        [tool("systemd-analyze"), "verify", "--man=no", directory / UNIT],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("drop_ins", DROP_INS.values(), ids=DROP_INS)
def test_systemd_reads_the_unit_without_a_word(tool, deploy, tree, tmp_path, drop_ins):
    texts = {name: (deploy / "systemd" / name).read_text() for name in drop_ins}
    assert read_by_systemd(tool, tree, tmp_path, texts) == (0, "")


def test_drop_in_of_the_file_sink_is_read_without_a_word(tool, tree, tmp_path):
    shown = doc_pages.marked(doc_pages.page("docs/reference/sinks.md"), "unit: logs directory")
    assert read_by_systemd(tool, tree, tmp_path, {"file.conf": shown}) == (0, "")
    code, said = read_by_systemd(tool, tree, tmp_path / "wrong", {"file.conf": shown.replace("LogsDir", "LogDir")})
    assert "LogDirectory" in said, code


@pytest.mark.parametrize("drop_ins", [[], ["credentials.conf"]], ids=["alone", "credentials"])
def test_sandbox_leaves_little_exposed(tool, deploy, tmp_path, drop_ins):
    shutil.copy(deploy / "systemd" / UNIT, tmp_path)
    (tmp_path / f"{UNIT}.d").mkdir()
    for name in drop_ins:
        shutil.copy(deploy / "systemd" / name, tmp_path / f"{UNIT}.d")
    done = subprocess.run(
        [tool("systemd-analyze"), "security", "--offline=yes", "--no-pager", tmp_path / UNIT],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    said = re.search(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert said, done.stderr
    assert float(said[1]) <= MOST_EXPOSURE


def test_every_program_that_the_unit_names_is_installed(unit, tree):
    named = {
        word.strip("'\";")
        for key in ("ExecStart", "ExecReload")
        for value in unit[key]
        for word in value.split()
        if word.strip("'\"").startswith(OPT)
    }
    assert named
    for name in named:
        assert os.access(tree.root / name.lstrip("/"), os.X_OK), name


def test_it_may_stop_as_slowly_as_the_agent_promises(unit):
    assert float(unit["TimeoutStopSec"][0]) >= read({}).stop_grace_seconds + 1


def test_a_frozen_vm_does_not_trip_the_watchdog(unit):
    assert float(unit["WatchdogSec"][0]) >= 2 * FREEZE_SECONDS


def systemd_version(tool):
    said = subprocess.run([tool("systemctl"), "--version"], capture_output=True, text=True, timeout=60, check=True)
    return int(said.stdout.split()[1])


def test_installer_lets_the_pauses_grow_where_systemd_knows_that(tree, tool, tmp_path, monkeypatch):
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
    analyze = [tool("systemd-analyze"), "verify", "--man=no", tmp_path / "steps.service"]
    said = subprocess.run(analyze, capture_output=True, text=True, timeout=60, check=False).stderr
    unknown = ["RestartSteps", "RestartMaxDelaySec"] if systemd_version(tool) < STEPS_SINCE else []
    assert re.findall(r"Unknown key '(\w+)'", said) == unknown, said


def test_it_is_never_given_up(unit):
    assert unit["Restart"] == ["always"]
    assert unit["StartLimitIntervalSec"] == ["0"]
    assert "RestartPreventExitStatus" not in unit


def test_it_is_ordered_behind_network_and_resolver(unit):
    after = unit["After"][0].split()
    assert {"network.target", "network-online.target", "nss-lookup.target"} <= set(after)
    assert "network-online.target" in unit["Wants"][0].split()


def test_drop_in_for_commands_takes_away_all_that_gives_the_service_a_namespace_of_its_own(unit, deploy):
    taken = settings_of(deploy / "systemd/command-sink.conf")
    protecting = {key for key in unit if key.startswith(("Protect", "Private"))}
    assert {key: taken.get(key) for key in protecting} == {
        key: ["default"] if key == "ProtectProc" else ["no"] for key in protecting
    }


def test_its_directories_are_those_of_the_program(unit):
    assert unit["StateDirectory"] == unit["ConfigurationDirectory"] == unit["User"] == unit["Group"] == [NAME]


def test_example_of_a_credential_names_the_path_that_systemd_gives_it(deploy):
    drop_in = deploy / "systemd/credentials.conf"
    said = re.findall(r'_file = "(.+?)"', drop_in.read_text())
    assert said == [f"/run/credentials/{UNIT}/{settings_of(drop_in)['LoadCredential'][0].split(':')[0]}"]


def test_installed_command_accepts_the_installed_configuration(tree):
    done = tree.run("check-config", "--config", tree.config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("The configuration is valid.")


def test_every_example_in_the_configuration_is_right_once_it_is_taken_in(tree, tmp_path):
    examples = re.sub(r"(?m)^# (?=\[|[a-z_]+ = )", "", tree.config.read_text())
    assert examples.count("[[sinks]]") == 3
    (tmp_path / "config.toml").write_text(examples)
    done = tree.run("check-config", "--config", tmp_path / "config.toml")
    # 1: the secret is not on this machine; 78 would be a wrong configuration
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("\nProblem: ") == 1
    assert "webhook-secret" in done.stdout


def test_what_is_installed_knows_nothing_of_the_tree(tree):
    wheres = [path for path in (tree.link / "bin").iterdir() if path.is_file() and not path.is_symlink()]
    for path in [*wheres, tree.link / "pyvenv.cfg"]:
        assert str(tree.root) not in path.read_text(), path
    link = tree.root / f"usr/local/bin/{NAME}"
    assert os.readlink(link) == f"{OPT}/venv/bin/{NAME}"  # noqa: PTH115  # Path.readlink has no text of its own


def test_unit_is_enabled_and_its_user_declared(tree):
    assert (tree.root / f"etc/systemd/system/multi-user.target.wants/{UNIT}").is_symlink()
    assert (tree.root / f"etc/sysusers.d/{NAME}.conf").is_file()
    if os.geteuid() == 0:
        assert re.search(rf"(?m)^{NAME}:.*:/usr/sbin/nologin$", (tree.root / "etc/passwd").read_text())


def test_modules_are_installed_compiled(tree):
    package = next((tree.link / "lib").glob("python*/site-packages/bridge"))
    compiled = {path.name.partition(".")[0] for path in (package / "__pycache__").glob("*.pyc")}
    assert compiled >= {path.stem for path in package.glob("*.py")}


def test_upgrade_keeps_configuration_drop_ins_and_one_version_to_go_back_to(tree):
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


def test_version_that_refuses_the_configuration_changes_nothing(tree):
    text, versions, linked = tree.config.read_text(), tree.versions, tree.link.resolve()
    tree.config.write_text("no_such_key = 1\n")
    done = tree.install()
    tree.config.write_text(text)
    assert done.returncode == 1
    assert "no_such_key" in done.stderr
    assert "Nothing was changed" in done.stderr
    assert (tree.versions, tree.link.resolve()) == (versions, linked)


def test_tree_holds_nothing_to_install_with(tree):
    held = {path.name.partition("-")[0] for path in (tree.link / "lib").glob("python*/site-packages/*.dist-info")}
    assert "scheduled_events_bridge" in held
    assert held & {"pip", "setuptools"} == set()


def test_extras_are_remembered_at_an_upgrade_until_they_are_forgotten(tree):
    def has_jinja2():
        return tree.run_python("-c", "import jinja2").returncode == 0

    assert not has_jinja2()
    for options, expected in ((["--extras", "template"], True), ([], True), (["--extras", "none"], False)):
        assert tree.install(*options).returncode == 0
        assert has_jinja2() == expected, options


def test_python_that_the_sandbox_hides_is_refused(tree, service_python, tmp_path):
    versions, linked = tree.versions, tree.link.resolve()
    hidden = tmp_path / "bin/python3"  # the service has a /tmp of its own
    hidden.parent.mkdir()
    shutil.copy(service_python.resolve(), hidden)
    done = tree.install("--python", hidden)
    assert done.returncode == 1
    assert f"{hidden} is in {hidden}, which the service cannot read" in done.stderr
    assert (tree.versions, tree.link.resolve()) == (versions, linked)


def test_uninstall_keeps_configuration_and_state_and_purge_takes_them(deploy, tmp_path):
    root = tmp_path / "root"
    program, kept = (
        root / f"opt/{NAME}/venvs/1/bin/python",
        [root / f"etc/{NAME}/config.toml", root / f"var/lib/{NAME}/x"],
    )
    drop_in = root / f"etc/systemd/system/{UNIT}.d/mine.conf"
    steps = drop_in.with_name("10-restart-steps.conf")
    unit = root / f"etc/systemd/system/{UNIT}"
    for path in (program, unit, drop_in, steps, root / f"usr/local/bin/{NAME}", *kept):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    uninstall = [deploy / "systemd/install.sh", "--uninstall", "--root", root]
    assert subprocess.run(uninstall, capture_output=True, timeout=30, check=False).returncode == 0
    assert {path for path in root.rglob("*") if path.is_file()} == {drop_in, *kept}
    assert subprocess.run([*uninstall, "--purge"], capture_output=True, timeout=30, check=False).returncode == 0
    assert [path for path in root.rglob("*") if NAME in path.name] == []


def test_configuration_that_is_named_replaces_the_one_that_is_there_if_it_is_right(tree, tmp_path):
    before, mine = tree.config.read_text(), tmp_path / "mine.toml"
    mine.write_text("no_such_key = 1\n")
    done = tree.install("--config", mine)
    assert (done.returncode, tree.config.read_text()) == (1, before)
    assert f"refuses {mine}" in done.stderr
    mine.write_text('labels = { team = "ledger" }\n')
    assert tree.install("--config", mine).returncode == 0
    assert tree.config.read_text() == mine.read_text()
