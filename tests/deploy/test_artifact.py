"""The contents of a release archive, and its installation on a bare Debian with its own systemd.

artifact/drive.sh runs a rollout and typical failures. The tests check the results.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import doc_pages
import pytest

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(1500)]

NAME = "scheduled-events-bridge"
ARCHES = {"x86_64": "x86_64", "arm64": "aarch64"}
MOST_BYTES = 25_000_000


def archive(artifacts, arch, kind=NAME):
    (path,) = artifacts.glob(f"{kind}-[0-9]*-linux-{arch}.tar.gz")
    return path


def members(path):
    with tarfile.open(path) as tar:
        return {member.name.partition("/")[2]: member for member in tar.getmembers()}


# ---- the lock -------------------------------------------------------------------------------------------------------


def test_lock_file_matches_pyproject(tool, checkout):
    uv = tool("uv")
    done = subprocess.run(
        [checkout / "deploy/artifact/lock.sh", "--check"],
        env={**os.environ, "PATH": f"{Path(uv).parent}:{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"run deploy/artifact/lock.sh: {done.stdout}{done.stderr}"


# ---- the archives ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHES)
def test_archive_is_small_and_contains_every_installation_file(artifacts, arch):
    path = archive(artifacts, arch)
    assert path.stat().st_size < MOST_BYTES
    assert archive(artifacts, arch, f"{NAME}-extras").stat().st_size < MOST_BYTES
    held = members(path)
    assert {"install.sh", "try_tree.py", f"{NAME}.service", "config.toml", "requirements.txt", "LICENSE"} <= set(held)
    wheels = {name.partition("/")[2].partition("-")[0] for name in held if name.startswith("wheels/")}
    assert {"scheduled_events_bridge", "requests", "cryptography", "msgspec", "jinja2"} <= wheels
    assert wheels & {"pip", "setuptools", "pygments", "rich"} == set()
    machines = {name for name in held if name.endswith(".whl") and "-any.whl" not in name}
    assert machines
    assert all(ARCHES[arch] in name for name in machines)


@pytest.mark.parametrize("page", ["docs/operate/install.md", "docs/start/first-vm.md"])
def test_documented_commands_unpack_the_built_archive(artifacts, tmp_path, page):
    for path in artifacts.iterdir():
        (tmp_path / path.name).symlink_to(path)
    [command] = re.findall(r"^tar -xzf .*-linux-x86_64$", doc_pages.page(page), re.MULTILINE)
    subprocess.run(["sh", "-euc", f"{command} && test -x install.sh"], cwd=tmp_path, timeout=60, check=True)


# ---- the archive for Windows ----------------------------------------------------------------------------------------


def windows_archive(artifacts):
    (path,) = artifacts.glob(f"{NAME}-*-windows-x86_64.zip")
    return path


@pytest.fixture(scope="module")
def unpacked_for_windows(artifacts, tmp_path_factory):
    directory = tmp_path_factory.mktemp("windows")
    shutil.unpack_archive(windows_archive(artifacts), directory)
    (unpacked,) = directory.iterdir()
    return unpacked


def test_windows_archive_contains_the_installer_the_service_and_the_same_wheel(unpacked_for_windows, artifacts, deploy):
    for name in ("install.ps1", "service.py", "host.py", "config.toml"):
        assert (unpacked_for_windows / name).read_bytes() == (deploy / "windows" / name).read_bytes(), name
    with tarfile.open(archive(artifacts, "x86_64")) as tar:
        (member,) = (member for member in tar if "/wheels/scheduled_events_bridge-" in member.name)
        own = tar.extractfile(member).read()
    assert (unpacked_for_windows / "wheels" / Path(member.name).name).read_bytes() == own
    assert (unpacked_for_windows / "LICENSE").exists()


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_windows_archive_installs_offline_with_hashes(unpacked_for_windows, python, package, tmp_path):
    """Install as install.ps1 does. The test evaluates the markers, because pip would evaluate them for this machine."""
    requirement = package("packaging.requirements").requirements.Requirement
    there = {
        "python_version": python, "python_full_version": f"{python}.0", "sys_platform": "win32", "os_name": "nt",
        "platform_system": "Windows", "platform_machine": "AMD64", "platform_python_implementation": "CPython",
        "implementation_name": "cpython", "extra": "",
    }  # fmt: skip
    lines = []
    files = sorted(unpacked_for_windows.glob("requirements*.txt"))
    assert len(files) == 4  # three extras
    for text in (file.read_text() for file in files):
        for head, hashes in re.findall(r"(?m)^([a-z0-9][^\n]*?)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", text):
            wanted = requirement(head)
            if wanted.marker is None or wanted.marker.evaluate(there):
                lines.append(f"{wanted.name}{wanted.specifier}{hashes}\n")
    assert len(lines) > 15
    (tmp_path / "lines.txt").write_text("".join(lines))
    report = tmp_path / "report"
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--isolated", "install", "--quiet", "--no-index", "--no-cache-dir",
         "--find-links", unpacked_for_windows / "wheels", "--no-deps", "--require-hashes", "--only-binary", ":all:",
         "--platform", "win_amd64", "--implementation", "cp", "--python-version", python, "--dry-run", "--report",
         report, "--target", tmp_path / "target", "--requirement", tmp_path / "lines.txt"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    got = {each["metadata"]["name"].lower() for each in json.loads(report.read_text())["install"]}
    some = {"scheduled-events-bridge", "pywin32", "requests", "cryptography", "apprise", "jinja2", "aiohttp"}
    assert some <= got
    assert got & {"rich", "pip", "setuptools"} == set()


# ---- a bare Debian --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def facts(drive, own_archive):
    """Return the results of artifact/drive.sh."""
    return drive("artifact", own_archive)


def test_installs_with_python_without_pip_and_prepared_secrets(facts):
    assert facts["python_has_no_pip"] == "yes"
    assert (facts["prepared_exit"], facts["prepared_problems"]) == ("0", "")
    assert facts["not_started_yet"] == "inactive"
    assert (facts["start_exit"], facts["ready"]) == ("0", "yes")
    assert int(facts["seconds_to_ready"]) < 60


def test_installation_contains_only_runtime_packages(facts):
    held = set(facts["distributions"].split())
    assert {"requests", "scheduled_events_bridge"} <= held
    assert held & {"pip", "setuptools", "pygments", "rich", "markdown_it_py"} == set()
    assert int(facts["installed_megabytes"]) < 50
    assert facts["manual"] == f"/usr/local/share/man/man1/{NAME}.1"


def test_upgrade_under_load_loses_no_records_and_keeps_the_extras(facts):
    assert facts["upgrade_exit"] == "0"
    assert facts["upgrade_switched"] == "yes"
    assert facts["upgrade_remembers_extras"] == "template"
    assert facts["load_went_on"] == "yes"
    assert re.fullmatch(r"[1-9]\d+ announced, 0 lost, 0 gaps", facts["upgrade_lost"])


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("hidden_interpreter", "which the service cannot read"),
        ("missing_library", "No module named 'requests'"),
        ("other_bytes", "DO NOT MATCH THE HASHES"),
        ("wrong_configuration", "This version refuses /run/wrong.toml. The service was not changed"),
        ("refused_configuration", f"This version refuses /etc/{NAME}/config.toml. The service was not changed"),
    ],
)
def test_broken_upgrade_is_rejected_before_any_change(facts, fault, said):
    assert facts[f"{fault}_exit"] == "1"
    assert facts[f"{fault}_version"] == "same"
    assert facts[f"{fault}_runs"] == "yes"
    assert facts[f"{fault}_not_restarted"] == "yes"
    assert said in facts[f"{fault}_said"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("does_not_start", "The new version does not start."),
        ("not_ready", "did not become ready: IMDS has not responded yet."),
    ],
)
def test_upgrade_that_fails_to_start_is_rolled_back(facts, fault, said):
    assert facts[f"{fault}_exit"] == "1"
    assert facts[f"{fault}_version"] == "same"
    assert said in facts[f"{fault}_said"]
    assert "The previous version was restored" in facts[f"{fault}_said"]


def test_rollback_restores_the_unit_and_config_and_removes_the_failed_version(facts):
    assert facts["does_not_start_runs"] == "yes"
    assert facts["ready_again_after_not_ready"] == "yes"
    assert facts["unit_was_put_back"] == "yes"
    assert facts["configuration_was_put_back"] == "yes"
    assert facts["trees"] == "2"


def test_uninstall_keeps_configuration_and_state_and_purge_removes_them(facts):
    assert facts["uninstall_exit"] == "0"
    assert facts["uninstall_is_active"] == "inactive"
    left = facts["uninstall_left"].split()
    assert {f"/etc/{NAME}", f"/var/lib/{NAME}"} <= set(left)
    assert not [path for path in left if path.startswith(("/opt", "/usr", "/etc/systemd"))]
    assert (facts["again_exit"], facts["again_runs"]) == ("0", "yes")
    assert facts["purge_exit"] == "0"
    assert (facts["purge_left"], facts["purge_more_than_before"]) == ("", "")


def test_failed_first_installation_leaves_no_running_service(facts):
    assert facts["first_fails_exit"] == "1"
    assert facts["first_fails_is_active"] == "inactive"
    assert facts["first_fails_is_enabled"] in ("", "not-found")
    assert facts["finished"] == "yes"
