"""Tests the agent's unit on a booted systemd (systemd/boot.sh).

systemd/drive.sh runs the operations and failures. The tests check the results.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(600)]

BOOT = Path(__file__).parent / "systemd/boot.sh"
SYSTEMD = Path("/lib/systemd/systemd")
BOOT_SECONDS = 400
#: The namespaces that boot.sh creates.
SPACES = ("--fork", "--pid", "--mount", "--net", "--cgroup", "--uts", "--ipc")


def boot(tree, directory, seconds):
    """Run boot.sh, and kill it with all of its children after *seconds*."""
    with (directory / "console").open("wb") as console:
        process = subprocess.Popen(
            ["bash", BOOT, tree, directory], stdout=console, stderr=console, start_new_session=True
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None


@pytest.fixture(scope="module")
def place(tool, unable, tmp_path_factory):
    """Return a directory for the booted systemd, on a machine that can start one."""
    for name in ("unshare", "ip", "openssl", "systemd-sysusers"):
        tool(name)
    directory = tmp_path_factory.mktemp("boot")
    if not SYSTEMD.exists() or boot("probe", directory, 30) != 0:
        # separately, because the output of boot.sh might be about cgroup2, which it needs first
        probe = subprocess.run(["unshare", *SPACES, "true"], capture_output=True, text=True, timeout=30, check=False)
        console = (directory / "console").read_text() if SYSTEMD.exists() else f"{SYSTEMD} is not here"
        unable("no systemd of its own starts here, with namespaces, overlays and cgroup2", probe.stderr or console)
    return directory


@pytest.fixture(scope="module")
def facts(deploy, package_source, clean_environment, place, service_python):
    directory = place
    shutil.rmtree(directory / "boot")
    subprocess.run(
        [deploy / "systemd/install.sh", "--root", directory / "tree", "--python", service_python, package_source],
        env=clean_environment, capture_output=True, timeout=300, check=True,
    )  # fmt: skip
    boot(directory / "tree", directory, BOOT_SECONDS)
    results = directory / "results"
    for name in ("console", "results/journal", "results/log"):  # shown when a test fails
        path = directory / name
        sys.stdout.write(f"---- {name}\n{path.read_text() if path.exists() else 'none'}\n")
    lines = (results / "facts").read_text().splitlines() if (results / "facts").exists() else []
    return dict(line.split("=", 1) for line in lines)


def test_enabled_unit_starts_at_boot_as_its_own_user(facts):
    assert facts["enabled_unit_came_up_at_boot"] == "yes"
    assert facts["user"] == "scheduled-events-bridge"
    assert facts["state_mode"] == "700 scheduled-events-bridge"


def test_unit_is_ready_before_the_first_poll_response(facts):
    assert facts["start"] == "0"
    assert int(facts["start_seconds"]) < 6  # the simulated service delays its first response
    assert facts["first_poll_was_answered_before_ready"] == "no"
    assert facts["record_in_the_journal"] == "yes"


def test_check_config_as_the_agent_user_detects_unreadable_files(facts):
    assert facts["check_as_the_user"] == "0"
    assert facts["check_as_the_user_of_what_only_root_reads"] == "1"


def test_reload_applies_a_valid_file_and_fails_on_an_invalid_one(facts):
    assert facts["reload"] == "0"
    assert facts["reload_of_a_wrong_file"] != "0"
    assert facts["wrong_file_is_named"] == "yes"
    assert facts["active_after_a_wrong_file"] == "active"


def test_unit_starts_after_the_configuration_is_fixed(facts):
    assert facts["tries_again_with_a_wrong_file"] == "yes"
    assert facts["says_78_for_a_wrong_file"] == "yes"
    assert facts["active_once_the_file_is_mended"] == "yes"


def test_unit_restarts_after_a_kill(facts):
    assert facts["restarted_after_a_kill"] == "yes"


def test_watchdog_restarts_a_hung_agent(facts):
    assert facts["watchdog_is_fed"] == "yes"
    assert facts["restarted_by_the_watchdog"] == "yes"
    assert facts["hang_is_in_the_journal"] == "yes"


@pytest.mark.parametrize("sink", ["webhook", "otlp", "eventhubs"])
def test_sinks_can_connect_from_the_sandbox(facts, sink):
    assert facts[f"tried_{sink}"] == "yes"


def test_start_and_reload_read_the_credentials(facts):
    assert facts["start_with_credentials"] == "0"
    assert facts["reload_with_credentials"] == "0"
    assert facts["check_at_a_reload_reads_credentials"] == "yes"


def test_command_sink_leaves_the_sandbox_only_with_its_drop_in(facts):
    assert facts["command_is_kept_in_the_sandbox"] == "yes"
    assert facts["start_with_the_drop_in_for_commands"] == "0"
    assert facts["command_works_with_its_drop_in"] == "yes"
    assert (
        facts["mounts_without_the_sandbox"] == "those of the host"
    )  # otherwise an umount of the command has no effect on the host
    assert facts["start_without_it_again"] == "0"
    assert facts["state_belongs_to_the_user_again"] == "scheduled-events-bridge"


def test_unit_stops_cleanly(facts):
    assert facts["stop"] == "0"
    assert facts["stop_result"] == "success 0"
    assert facts["finished"] == "yes"
