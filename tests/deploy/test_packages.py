"""The contents of the .deb and the .rpm of a release, and their installation on a bare Debian with systemd.

packages/drive.sh runs the operations, and the tests check the results. Not covered: Red Hat and SUSE machines. Debian's
rpm installs the .rpm on Debian without checking the dependencies.
"""

import itertools
import platform
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(1500)]

NAME = "scheduled-events-bridge"
LIB = f"/usr/lib/{NAME}"
#: Machine name of the kernel -> architecture name of Debian.
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
MANUAL = f"/usr/share/man/man1/{NAME}.1.gz"
COMPLETIONS = {
    "deb": "/usr/share/zsh/vendor-completions/_",
    "rpm": "/usr/share/zsh/site-functions/_",
    "both": "/usr/share/bash-completion/completions/",
}
MOST_BYTES = 20_000_000


def package(artifacts, kind, machine):
    pattern = f"{NAME}_*_{MACHINES[machine]}.deb" if kind == "deb" else f"{NAME}-*.{machine}.rpm"
    (path,) = artifacts.glob(pattern)
    return path


def said(*command):
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.fixture(scope="module", params=MACHINES)
def deb(request, artifacts, tool):
    tool("dpkg-deb")
    return package(artifacts, "deb", request.param), request.param


@pytest.fixture(scope="module", params=MACHINES)
def rpm(request, artifacts, tool):
    tool("rpm")
    return package(artifacts, "rpm", request.param), request.param


# ---- contents -------------------------------------------------------------------------------------------------------


def listing(path):
    """Return the names in a .deb with their modes, owners, and link targets."""
    found = {}
    for line in said("dpkg-deb", "--contents", path).splitlines():
        mode, owner, _, _, _, names = line.split(None, 5)
        name, _, target = names.removeprefix(".").partition(" -> ")
        found[name] = (mode, owner, target)
    return found


def test_deb_contains_the_archive_command_manual_and_completions(deb):
    path, machine = deb
    assert path.stat().st_size < MOST_BYTES
    held = listing(path)
    wanted = {f"{LIB}/install.sh", f"{LIB}/requirements.txt", f"{LIB}/{NAME}.service", MANUAL}
    wanted |= {COMPLETIONS["deb"] + NAME, COMPLETIONS["both"] + NAME, f"/usr/share/doc/{NAME}/copyright"}
    assert wanted <= set(held)
    assert held[f"/usr/bin/{NAME}"][2] == f"/opt/{NAME}/venv/bin/{NAME}"
    assert {owner for _, owner, _ in held.values()} == {"root/root"}
    assert {mode for mode, _, _ in held.values()} <= {"drwxr-xr-x", "-rw-r--r--", "-rwxr-xr-x", "lrwxrwxrwx"}
    assert [name for name in held if f"_{machine}.whl" in name]
    # /etc, /var, and /usr/local are for the operator and the installer
    assert {name.split("/")[1] for name in held if name.strip("/")} == {"usr"}
    assert not [name for name in held if name.startswith(("/usr/local", "/usr/share/share", f"{LIB}/share"))]


def test_deb_requires_a_python_version_with_bundled_libraries(deb):
    path, _ = deb
    depends = said("dpkg-deb", "--field", path, "Depends").strip().split(", ")
    assert depends[:2] == ["python3 (>= 3.10)", "python3 (<< 3.15)"]


def test_dpkg_sorts_a_release_candidate_before_its_release(tool, deploy):
    made = runpy.run_path(str(deploy / "artifact/packages.py"))["Package"]
    versions = ["0.1.0", "0.2.0.dev3", "0.2.0a1", "0.2.0rc1", "0.2.0", "0.2.0.post1", "0.10.0"]
    own = [made(tree=None, version=version, machine="", pythons=(), epoch=0).own_version for version in versions]
    for older, newer in itertools.pairwise(own):
        subprocess.run([tool("dpkg"), "--compare-versions", older, "lt", newer], timeout=30, check=True)


def test_shellcheck_accepts_package_scripts_and_postrm_contains_the_installer(tool, deploy, artifacts, tmp_path):
    tool("dpkg-deb")
    said("dpkg-deb", "--control", package(artifacts, "deb", platform.machine()), tmp_path)
    installer = (deploy / "systemd/install.sh").read_text()
    assert f"<<'END OF THE INSTALLER'\n{installer}END OF THE INSTALLER\n" in (tmp_path / "postrm").read_text()
    for scripts in (deploy / "artifact/package", tmp_path):
        paths = [scripts / name for name in ("postinst", "prerm", "postrm")]
        done = subprocess.run([tool("shellcheck"), *paths], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout


def test_rpm_contains_the_same_files_as_the_deb(rpm, artifacts, tool):
    path, machine = rpm
    tool("dpkg-deb")
    assert path.stat().st_size < MOST_BYTES
    wanted = "[%{FILENAMES}|%{FILEMODES:perms}|%{FILEUSERNAME}\n]"
    rows = [line.split("|") for line in said("rpm", "-qp", "--qf", wanted, path).splitlines()]
    held = {name: mode for name, mode, _ in rows}
    assert {owner for _, _, owner in rows} == {"root"}
    own = {name.rstrip("/") for name in held if name.startswith(f"{LIB}/")}
    twin = listing(package(artifacts, "deb", machine))
    assert own == {name.rstrip("/") for name in twin if name.startswith(f"{LIB}/") and name != f"{LIB}/"}
    assert {"/usr/share/zsh/site-functions", "/usr/share/fish/vendor_completions.d"} <= set(
        held
    )  # rpm removes them on erase
    assert {MANUAL, COMPLETIONS["rpm"] + NAME, COMPLETIONS["both"] + NAME, f"/usr/bin/{NAME}"} <= set(held)
    assert (held[f"{LIB}/install.sh"], held[f"{LIB}/built-for"]) == ("-rwxr-xr-x", "-rw-r--r--")
    assert said("rpm", "-qp", "--qf", "%{ARCH} %{FILEDIGESTALGO} %{PAYLOADCOMPRESSOR}", path) == f"{machine} 8 gzip"


def test_archives_and_packages_are_reproducible(artifacts, deploy, package_source, tool, tmp_path):
    if package_source.suffix != ".whl":
        pytest.skip("WHEEL is not set")
    for name in ("dpkg-deb", "rpmbuild"):
        tool(name)
    arch = {"x86_64": "x86_64", "aarch64": "arm64"}[platform.machine()]
    build = [sys.executable, deploy / "artifact/build.py", "--wheel", package_source, "--out", tmp_path, "--arch", arch]
    subprocess.run([*build, "--package", "deb", "--package", "rpm"], capture_output=True, timeout=600, check=True)
    for kind in ("deb", "rpm"):
        new, old = (package(where, kind, platform.machine()) for where in (tmp_path, artifacts))
        assert new.read_bytes() == old.read_bytes(), kind
    for new in tmp_path.glob("*.tar.gz"):
        assert new.read_bytes() == (artifacts / new.name).read_bytes(), new.name
    assert len(list(tmp_path.glob("*.tar.gz"))) == 2  # and the extras


# ---- a bare Debian --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def later_rpms(own_archive, deploy, tool, tmp_path_factory):
    """Return three upgrades: a good one, one without a required library, and one that fixes it."""
    tool("rpmbuild")
    directory = tmp_path_factory.mktemp("later")
    made = runpy.run_path(str(deploy / "artifact/packages.py"))["Package"]
    without_library = runpy.run_path(str(Path(__file__).parent / "artifact/ask.py"))["without_library"]
    found = []
    for version, name in (("9.1", "upgrade"), ("9.2", "missing-library"), ("9.3", "mended")):
        said("mkdir", directory / name)
        said("tar", "-C", directory / name, "-xzf", own_archive, "--strip-components=1")
        if name == "missing-library":
            without_library("requests", str(directory / name / "requirements.txt"))
        new = made(tree=directory / name, version=version, machine=platform.machine(), pythons=("3.11",), epoch=0)
        found.append(new.make("rpm", directory).rename(directory / f"{name}.rpm"))
    return found


@pytest.fixture(scope="module")
def facts(drive, artifacts, own_archive, later_rpms, tool):
    """Return the results of packages/drive.sh."""
    tool("dpkg-deb")
    own = [package(artifacts, kind, platform.machine()) for kind in ("deb", "rpm")]
    return drive("packages", own_archive, *own, *later_rpms)


def test_deb_starts_with_the_existing_secrets_and_configuration(facts):
    assert (facts["install_exit"], facts["install_problems"]) == ("0", "")
    assert facts["ready"] == "yes"
    assert int(facts["seconds_to_ready"]) < 60
    assert facts["configuration_was_left"] == "yes"


def test_command_is_in_usr_bin_and_has_shell_completion(facts):
    assert facts["command_says"].startswith(f"{NAME}, version ")
    assert facts["nothing_in_usr_local"] == ""
    assert facts["changed_files"] == ""
    assert facts["completes"] == "status"


def test_deb_upgrades_and_rollbacks_under_load_lose_no_records(facts):
    assert (facts["upgrade_exit"], facts["upgrade_switched"], facts["load_went_on"]) == ("0", "yes", "yes")
    assert re.fullmatch(r"[1-9]\d+ announced, 0 lost, 0 gaps", facts["upgrade_lost"])


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("missing_library", "No module named 'requests'"),
        ("hidden_interpreter", "python3 is in /root/python/bin/python3, which the service cannot read"),
        ("refused_configuration", f"This version refuses /etc/{NAME}/config.toml. The service was not changed"),
    ],
)
def test_broken_deb_upgrade_is_rejected_before_any_change(facts, fault, words):
    assert (facts[f"{fault}_exit"], facts[f"{fault}_version"]) == ("1", "same")
    assert (facts[f"{fault}_runs"], facts[f"{fault}_not_restarted"]) == ("yes", "yes")
    assert words in facts[f"{fault}_said"]


def test_deb_upgrade_that_fails_to_start_is_rolled_back(facts):
    assert (facts["does_not_start_exit"], facts["does_not_start_version"]) == ("1", "same")
    assert facts["does_not_start_runs"] == "yes"
    assert "The previous version was restored" in facts["does_not_start_said"]


REFUSING = "Sink refusing needs attention. `status` shows its last error."
DEAD = "Sink dead is stuck: its oldest record has waited N s."


@pytest.mark.parametrize(("destination", "reason"), [("refusing", REFUSING), ("dead", DEAD)])
def test_upgrade_succeeds_while_a_destination_fails(facts, destination, reason):
    assert facts[f"{destination}_before"] == reason
    assert (facts[f"{destination}_exit"], facts[f"{destination}_switched"]) == ("0", "yes")
    assert facts[f"{destination}_after"] == reason


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("cannot_start", "The new version does not start."),
        ("cannot_poll", "The new version did not become ready: IMDS has not responded yet."),
        ("cannot_read", f"The state directory /var/lib/{NAME} cannot be created, opened, or locked"),
    ],
)
def test_broken_upgrade_is_rolled_back_while_a_destination_fails(facts, fault, words):
    assert facts[f"{fault}_before"] == DEAD
    assert (facts[f"{fault}_exit"], facts[f"{fault}_switched"]) == ("1", "no")
    assert words in facts[f"{fault}_said"]
    assert "The previous version was restored" in facts[f"{fault}_said"]
    assert facts[f"{fault}_after"] == DEAD


def test_rejected_deb_upgrade_can_be_configured_after_the_cause_is_fixed(facts):
    assert facts["missing_library_state"] == "half-configured"
    assert (facts["mended_exit"], facts["mended_state"]) == ("0", "installed")
    assert (facts["mended_switched"], facts["mended_runs"]) == ("yes", "yes")


def test_upgrade_does_not_start_a_disabled_service(facts):
    assert facts["disabled_exit"] == "0"
    assert (facts["disabled_is_active"], facts["disabled_is_enabled"]) == ("inactive", "disabled")


def test_new_python_version_triggers_a_reinstallation(facts):
    assert (facts["trigger_exit"], facts["trigger_runs"]) == ("0", "yes")
    assert facts["trigger_command_says"].startswith(f"{NAME}, version ")


def test_remove_keeps_configuration_and_state_and_purge_removes_them(facts):
    assert (facts["remove_exit"], facts["remove_is_active"]) == ("0", "inactive")
    left = facts["remove_left"].split()
    assert {f"/etc/{NAME}", f"/var/lib/{NAME}"} <= set(left)
    assert not [path for path in left if path.startswith(("/opt", "/usr", "/etc/systemd"))]
    assert (facts["purge_exit"], facts["purge_left"], facts["purge_more_than_before"]) == ("0", "", "")


def test_deb_replaces_an_archive_installation_and_keeps_a_masked_unit(facts):
    assert (facts["archive_exit"], facts["archive_manual"]) == ("0", "yes")
    assert (facts["mask_was_left"], facts["masked_is_active"]) == ("/dev/null", "inactive")
    assert (facts["over_archive_exit"], facts["over_archive_problems"]) == ("0", "")
    assert facts["over_archive_in_usr_local"] == ""
    assert facts["over_archive_is_active"] == "inactive"


def test_rpm_installation_becomes_ready(facts):
    assert (facts["rpm_install_exit"], facts["rpm_ready"], facts["rpm_changed_files"]) == ("0", "yes", "")
    assert int(facts["rpm_seconds_to_ready"]) < 60


def test_rpm_upgrade_under_load_loses_no_records(facts):
    assert (facts["rpm_upgrade_exit"], facts["rpm_upgrade_switched"], facts["rpm_load_went_on"]) == ("0", "yes", "yes")
    assert re.fullmatch(r"[1-9]\d+ announced, 0 lost, 0 gaps", facts["rpm_upgrade_lost"])


@pytest.mark.parametrize(
    ("fault", "words"),
    [("missing_library", "No module named 'requests'"), ("refused_configuration", "This version refuses /etc/")],
)
def test_broken_rpm_upgrade_reports_the_error_and_keeps_the_running_version(facts, fault, words):
    assert facts[f"rpm_{fault}_version"] == "same"
    assert (facts[f"rpm_{fault}_runs"], facts[f"rpm_{fault}_not_restarted"]) == ("yes", "yes")
    assert words in facts[f"rpm_{fault}_said"]
    assert "scriptlet failed, exit status 1" in facts[f"rpm_{fault}_said"]  # rpm itself exits with 0


def test_reinstalled_rpm_activates_the_rejected_version(facts):
    assert (facts["rpm_mended_exit"], facts["rpm_mended_switched"], facts["rpm_mended_runs"]) == ("0", "yes", "yes")


def test_rpm_erase_keeps_configuration_and_state_unless_purged_before(facts):
    assert (facts["rpm_erase_exit"], facts["rpm_erase_is_active"]) == ("0", "inactive")
    left = facts["rpm_erase_left"].split()
    assert {f"/etc/{NAME}", f"/var/lib/{NAME}"} <= set(left)
    assert not [path for path in left if path.startswith(("/opt", "/usr", "/etc/systemd"))]
    assert (facts["rpm_again_exit"], facts["rpm_again_runs"]) == ("0", "yes")
    assert (facts["rpm_purge_exit"], facts["rpm_erase_after_purge_exit"]) == ("0", "0")
    assert (facts["rpm_purge_left"], facts["rpm_purge_more_than_before"]) == ("", "")
    assert facts["finished"] == "yes"
