"""The .deb and the .rpm of a release: what they hold, and what becomes of a bare Debian with them, under a systemd.

What an operator does stands in packages/drive.sh; here is what must come of it. What that leaves open: a machine of Red
Hat's or SUSE's. The .rpm is put on a Debian, by Debian's rpm, which looks for none of what it requires.
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
#: The kernel's word for a machine, and Debian's.
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


# ---- what they hold -------------------------------------------------------------------------------------------------


def listing(path):
    """Return the names in a .deb with their modes, owners and what they point to."""
    found = {}
    for line in said("dpkg-deb", "--contents", path).splitlines():
        mode, owner, _, _, _, names = line.split(None, 5)
        name, _, target = names.removeprefix(".").partition(" -> ")
        found[name] = (mode, owner, target)
    return found


def test_deb_holds_the_archive_the_command_the_manual_and_the_completions(deb):
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
    # /etc, /var and /usr/local are the operator's, and what the installer puts there
    assert {name.split("/")[1] for name in held if name.strip("/")} == {"usr"}
    assert not [name for name in held if name.startswith(("/usr/local", "/usr/share/share", f"{LIB}/share"))]


def test_deb_requires_a_python_for_which_it_has_libraries(deb):
    path, _ = deb
    depends = said("dpkg-deb", "--field", path, "Depends").strip().split(", ")
    assert depends[:2] == ["python3 (>= 3.10)", "python3 (<< 3.15)"]


def test_release_candidate_is_older_than_its_release_for_dpkg_too(tool, deploy):
    made = runpy.run_path(str(deploy / "artifact/packages.py"))["Package"]
    versions = ["0.1.0", "0.2.0.dev3", "0.2.0a1", "0.2.0rc1", "0.2.0", "0.2.0.post1", "0.10.0"]
    own = [made(tree=None, version=version, machine="", pythons=(), epoch=0).own_version for version in versions]
    for older, newer in itertools.pairwise(own):
        subprocess.run([tool("dpkg"), "--compare-versions", older, "lt", newer], timeout=30, check=True)


def test_scripts_of_the_packages_are_clean_and_the_purge_has_the_whole_installer(tool, deploy, artifacts, tmp_path):
    tool("dpkg-deb")
    said("dpkg-deb", "--control", package(artifacts, "deb", platform.machine()), tmp_path)
    installer = (deploy / "systemd/install.sh").read_text()
    assert f"<<'END OF THE INSTALLER'\n{installer}END OF THE INSTALLER\n" in (tmp_path / "postrm").read_text()
    for scripts in (deploy / "artifact/package", tmp_path):
        paths = [scripts / name for name in ("postinst", "prerm", "postrm")]
        done = subprocess.run([tool("shellcheck"), *paths], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout


def test_rpm_holds_what_the_deb_holds(rpm, artifacts, tool):
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
    assert {"/usr/share/zsh/site-functions", "/usr/share/fish/vendor_completions.d"} <= set(held)  # gone with it
    assert {MANUAL, COMPLETIONS["rpm"] + NAME, COMPLETIONS["both"] + NAME, f"/usr/bin/{NAME}"} <= set(held)
    assert (held[f"{LIB}/install.sh"], held[f"{LIB}/built-for"]) == ("-rwxr-xr-x", "-rw-r--r--")
    assert said("rpm", "-qp", "--qf", "%{ARCH} %{FILEDIGESTALGO} %{PAYLOADCOMPRESSOR}", path) == f"{machine} 8 gzip"


def test_same_inputs_give_the_same_archives_and_packages(artifacts, deploy, package_source, tool, tmp_path):
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
    """Return an upgrade, one that lacks a library, and the one that mends it."""
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
    """Return what packages/drive.sh found."""
    tool("dpkg-deb")
    own = [package(artifacts, kind, platform.machine()) for kind in ("deb", "rpm")]
    return drive("packages", own_archive, *own, *later_rpms)


def test_deb_is_ready_soon_with_the_secrets_and_the_configuration_that_were_there(facts):
    assert (facts["install_exit"], facts["install_problems"]) == ("0", "")
    assert facts["ready"] == "yes"
    assert int(facts["seconds_to_ready"]) < 60
    assert facts["configuration_was_left"] == "yes"


def test_command_of_the_package_is_in_usr_bin_and_completed_by_the_shell(facts):
    assert facts["command_says"].startswith(f"{NAME}, version ")
    assert facts["nothing_in_usr_local"] == ""
    assert facts["changed_files"] == ""
    assert facts["completes"] == "status"


def test_upgrades_of_the_deb_under_load_lose_nothing_also_those_that_give_way(facts):
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
def test_broken_upgrade_of_the_deb_is_refused_before_anything_is_changed(facts, fault, words):
    assert (facts[f"{fault}_exit"], facts[f"{fault}_version"]) == ("1", "same")
    assert (facts[f"{fault}_runs"], facts[f"{fault}_not_restarted"]) == ("yes", "yes")
    assert words in facts[f"{fault}_said"]


def test_upgrade_of_the_deb_that_does_not_start_gives_way_to_the_version_before(facts):
    assert (facts["does_not_start_exit"], facts["does_not_start_version"]) == ("1", "same")
    assert facts["does_not_start_runs"] == "yes"
    assert "The previous version was restored" in facts["does_not_start_said"]


REFUSING = "Sink refusing needs attention. `status` shows its last error."
DEAD = "Sink dead is stuck: its oldest record has waited N s."


@pytest.mark.parametrize(("destination", "reason"), [("refusing", REFUSING), ("dead", DEAD)])
def test_upgrade_completes_while_a_destination_fails_and_is_as_ready_as_before(facts, destination, reason):
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
def test_broken_upgrade_is_rolled_back_also_while_a_destination_fails(facts, fault, words):
    assert facts[f"{fault}_before"] == DEAD
    assert (facts[f"{fault}_exit"], facts[f"{fault}_switched"]) == ("1", "no")
    assert words in facts[f"{fault}_said"]
    assert "The previous version was restored" in facts[f"{fault}_said"]
    assert facts[f"{fault}_after"] == DEAD


def test_upgrade_of_the_deb_that_was_refused_is_configured_once_the_cause_is_mended(facts):
    assert facts["missing_library_state"] == "half-configured"
    assert (facts["mended_exit"], facts["mended_state"]) == ("0", "installed")
    assert (facts["mended_switched"], facts["mended_runs"]) == ("yes", "yes")


def test_upgrade_leaves_a_service_off_that_was_switched_off(facts):
    assert facts["disabled_exit"] == "0"
    assert (facts["disabled_is_active"], facts["disabled_is_enabled"]) == ("inactive", "disabled")


def test_another_python_makes_the_package_install_itself_anew(facts):
    assert (facts["trigger_exit"], facts["trigger_runs"]) == ("0", "yes")
    assert facts["trigger_command_says"].startswith(f"{NAME}, version ")


def test_remove_keeps_configuration_and_state_and_purge_leaves_nothing(facts):
    assert (facts["remove_exit"], facts["remove_is_active"]) == ("0", "inactive")
    left = facts["remove_left"].split()
    assert {f"/etc/{NAME}", f"/var/lib/{NAME}"} <= set(left)
    assert not [path for path in left if path.startswith(("/opt", "/usr", "/etc/systemd"))]
    assert (facts["purge_exit"], facts["purge_left"], facts["purge_more_than_before"]) == ("0", "", "")


def test_mask_is_left_and_the_deb_takes_over_from_an_archive_and_starts_nothing_where_nothing_may(facts):
    assert (facts["archive_exit"], facts["archive_manual"]) == ("0", "yes")
    assert (facts["mask_was_left"], facts["masked_is_active"]) == ("/dev/null", "inactive")
    assert (facts["over_archive_exit"], facts["over_archive_problems"]) == ("0", "")
    assert facts["over_archive_in_usr_local"] == ""
    assert facts["over_archive_is_active"] == "inactive"


def test_rpm_is_ready_soon(facts):
    assert (facts["rpm_install_exit"], facts["rpm_ready"], facts["rpm_changed_files"]) == ("0", "yes", "")
    assert int(facts["rpm_seconds_to_ready"]) < 60


def test_upgrades_of_the_rpm_under_load_lose_nothing(facts):
    assert (facts["rpm_upgrade_exit"], facts["rpm_upgrade_switched"], facts["rpm_load_went_on"]) == ("0", "yes", "yes")
    assert re.fullmatch(r"[1-9]\d+ announced, 0 lost, 0 gaps", facts["rpm_upgrade_lost"])


@pytest.mark.parametrize(
    ("fault", "words"),
    [("missing_library", "No module named 'requests'"), ("refused_configuration", "This version refuses /etc/")],
)
def test_broken_upgrade_of_the_rpm_says_so_and_leaves_the_version_before_running(facts, fault, words):
    assert facts[f"rpm_{fault}_version"] == "same"
    assert (facts[f"rpm_{fault}_runs"], facts[f"rpm_{fault}_not_restarted"]) == ("yes", "yes")
    assert words in facts[f"rpm_{fault}_said"]
    assert "scriptlet failed, exit status 1" in facts[f"rpm_{fault}_said"]  # rpm itself ends with 0 then


def test_rpm_that_is_installed_again_puts_the_version_into_place_that_was_refused(facts):
    assert (facts["rpm_mended_exit"], facts["rpm_mended_switched"], facts["rpm_mended_runs"]) == ("0", "yes", "yes")


def test_rpm_that_is_erased_keeps_configuration_and_state_and_a_purge_before_leaves_nothing(facts):
    assert (facts["rpm_erase_exit"], facts["rpm_erase_is_active"]) == ("0", "inactive")
    left = facts["rpm_erase_left"].split()
    assert {f"/etc/{NAME}", f"/var/lib/{NAME}"} <= set(left)
    assert not [path for path in left if path.startswith(("/opt", "/usr", "/etc/systemd"))]
    assert (facts["rpm_again_exit"], facts["rpm_again_runs"]) == ("0", "yes")
    assert (facts["rpm_purge_exit"], facts["rpm_erase_after_purge_exit"]) == ("0", "0")
    assert (facts["rpm_purge_left"], facts["rpm_purge_more_than_before"]) == ("", "")
    assert facts["finished"] == "yes"
