"""The installer of the systemd service."""

import os
import platform
import pty
import re
import shutil
import subprocess
from pathlib import Path

import pytest

NAME = "scheduled-events-bridge"
UNIT = f"{NAME}.service"

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(600)]

#: Stands in for a Python of another version, and creates venvs that contain only itself. The agent of such a venv
#: rejects a configuration with the word "refused", and uses colors on a terminal unless NO_COLOR has a value.
PYTHON = """#!/bin/sh
for last; do :; done
case "$*" in
  *"-m venv "*) mkdir -p "$last/bin" && cp "$0" "$last/bin/python" ;;
  *check-config*) [ ! -t 2 ] || [ -n "$NO_COLOR" ] || echo colors >&2; ! grep -q refused "$last" || exit 78 ;;
  -c*) exec {python} -c "import sys; sys.version_info = {version}; exec(sys.argv[1])" "$2" ;;
esac
"""


@pytest.fixture
def stand_in(service_python):
    """Return a function that writes a stand-in for another Python version to a path."""

    def write(path, version):
        path.parent.mkdir(exist_ok=True)
        path.write_text(PYTHON.format(python=service_python, version=version))
        path.chmod(0o755)
        return path

    return write


@pytest.fixture
def on_this_machine(tool, unable, tmp_path):
    """Return a function that runs a command on a discarded overlay of /, with a systemctl that only records calls."""
    inside = (
        "mount --make-rprivate / && mount -t tmpfs none /run && mkdir -p /run/systemd/system && "
        "mount -t tmpfs none /opt && mount -t tmpfs none /usr/local && mkdir /usr/local/bin && "
        'cp "$0" /usr/local/bin && mount -t tmpfs none "$2" && mkdir "$2/up" "$2/work" && '
        'mount -t overlay none -o "lowerdir=/etc,upperdir=$2/up,workdir=$2/work" /etc && '
        'PATH=/usr/local/bin:$PATH && shift 2 && exec "$@"'
    )
    systemctl, notes, scratch = tmp_path / "systemctl", tmp_path / "notes", tmp_path / "scratch"
    systemctl.write_text(f'#!/bin/sh\n[ "$1" = --version ] || printf "%s\\n" "$*" >>{notes}\n')
    systemctl.chmod(0o755)
    scratch.mkdir()
    within = [tool("unshare"), "--mount", "sh", "-c", inside, systemctl, "-", scratch]
    probe = subprocess.run([*within, "true"], capture_output=True, text=True, timeout=30, check=False)
    if probe.returncode:
        unable("no namespaces and overlays make a machine here that forgets what is installed", probe.stderr)

    def run(*command, stderr=subprocess.PIPE, **environment):
        done = subprocess.run(
            [*within, *command], env=os.environ | environment, stdout=subprocess.PIPE, stderr=stderr,
            text=True, timeout=60, check=False,
        )  # fmt: skip
        return done, notes.read_text().splitlines() if notes.exists() else []

    return run


@pytest.fixture
def onto_this_machine(on_this_machine, stand_in, deploy, tmp_path):
    """Return a function that installs a wheel on that overlay, without --root."""
    wheel = tmp_path / "agent.whl"
    wheel.touch()

    def install(*arguments, version=(3, 12, 0), **options):
        python = stand_in(tmp_path / "python", version)
        return on_this_machine(deploy / "systemd/install.sh", "--python", python, *arguments, wheel, **options)

    return install


@pytest.fixture
def archive(deploy, tmp_path):
    """Return the directory of an unpacked archive that has libraries only for Python 3.10."""
    directory = shutil.copytree(deploy / "systemd", tmp_path / "archive")
    (directory / "built-for").write_text(f"version=1.0\nmachine={platform.machine()}\npythons='3.10'\n")
    return directory


def test_installer_starts_the_agent(onto_this_machine):
    done, asked = onto_this_machine()
    assert done.returncode == 0, done.stderr
    assert asked == ["daemon-reload", f"--quiet enable {UNIT}", f"restart {UNIT}"]
    assert "is not ready" not in done.stdout + done.stderr


def test_no_start_leaves_the_running_service_and_prints_the_restart_command(onto_this_machine):
    done, asked = onto_this_machine("--no-start")
    assert done.returncode == 0, done.stderr
    assert asked == ["daemon-reload", f"--quiet enable {UNIT}"]
    assert f"systemctl restart {NAME}" in done.stdout


@pytest.mark.parametrize(("no_color", "has_colors"), [("", True), ("1", False)])
def test_no_color_applies_to_commands_run_by_the_installer(onto_this_machine, no_color, has_colors):
    ours, theirs = pty.openpty()
    try:
        done, _ = onto_this_machine(stderr=theirs, NO_COLOR=no_color)
        os.write(theirs, b"END\n")
        shown = os.read(ours, 65536).decode()
    finally:
        os.close(theirs)
        os.close(ours)
    assert (done.returncode, "colors" in shown) == (0, has_colors), shown


@pytest.mark.parametrize(
    ("version", "code", "said"),
    [((3, 9, 20), 1, "3.10 or newer"), ((3, 14, 8), 0, ""), ((3, 15, 0), 0, "tested with Python 3.10 to 3.14 only")],
)
def test_newer_python_prints_a_warning_and_an_older_python_is_rejected(onto_this_machine, version, code, said):
    done, _ = onto_this_machine(version=version)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert ("tested" in done.stderr) == (version >= (3, 15))


def test_supported_python_is_preferred_over_a_newer_one_first_in_path(on_this_machine, stand_in, archive, tmp_path):
    newer = stand_in(tmp_path / "bin/python3", (3, 15, 0))
    stand_in(tmp_path / "bin/python3.10", (3, 10, 4))
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done, _ = on_this_machine(archive / "install.sh", PATH=path)
    assert done.returncode == 0, done.stderr
    done, _ = on_this_machine(archive / "install.sh", "--python", newer, PATH=path)
    assert done.returncode == 1
    assert f"{newer} is Python 3.15, but this archive has libraries for 3.10." in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Name the wheel or checkout"),
        (["--prefix", "/x"], "Unknown option --prefix"),
        (["--root"], "--root needs a value"),
        (["--config"], "--config needs a value"),
        (["--config", "nowhere.toml", str(Path(__file__).parents[2])], "The file nowhere.toml does not exist"),
        (["--wait", "soon"], "--wait needs whole seconds, not soon"),
        (["--purge"], "--purge requires --uninstall"),
        (["--uninstall", "nowhere"], "--uninstall accepts only --purge and --root"),
        (["nowhere.whl"], "The file nowhere.whl does not exist"),
        (["nowhere"], "neither a wheel nor a checkout"),
    ],
)
def test_wrong_usage_exits_with_2_and_the_reason(deploy, arguments, said):
    done = subprocess.run(
        [deploy / "systemd/install.sh", *arguments], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 2
    assert said in done.stderr


def test_help_lists_every_option_of_the_installer(deploy):
    done = subprocess.run(
        [deploy / "systemd/install.sh", "--help"], capture_output=True, text=True, timeout=30, check=True
    )
    lines = re.findall(r"^ +(--[a-z| -]+)\)", (deploy / "systemd/install.sh").read_text(), re.MULTILINE)
    accepted = set(re.findall(r"--[a-z-]+", " ".join(lines)))
    assert accepted > {"--config", "--no-start", "--purge"}
    assert accepted <= set(re.findall(r"--[a-z-]+", done.stdout))


def test_shellcheck_accepts_the_shell_scripts(tool, deploy):
    here = Path(__file__).parent
    scripts = [deploy / name for name in ("systemd/install.sh", "artifact/lock.sh", "azure/fleet/sas.sh")]
    names = ("systemd", "artifact", "packages", "ansible", "portal")
    scripts += [each for name in names for each in sorted(here.glob(f"{name}/*.sh"))]
    assert len(scripts) == 12
    done = subprocess.run(
        [tool("shellcheck"), "--external-sources", *scripts], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout
