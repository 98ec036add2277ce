"""The Ansible role on several machines, each a bare Debian with its own systemd and network.

Ansible connects with ansible/ssh.sh in place of ssh and runs the commands of the rollout page. The tests with three
machines take minutes:

    ARTIFACTS=dist BARE_DEBIAN=/a/debootstrap pytest -m long tests/deploy/test_ansible.py
"""

import contextlib
import hashlib
import shlex
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import doc_pages
import pytest
from ansible_fleet import CONFIGURATIONS, ETC, NAME, ROLE, SECRET, Fleet, environment

HERE = Path(__file__).parent
NEW = "99.0.0"


# ---- the files ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def playbooks(deploy, tmp_path_factory):
    """Return a copy of deploy/ansible, which may receive an inventory next to the playbooks."""
    return shutil.copytree(deploy / "ansible", tmp_path_factory.mktemp("ansible") / "ansible")


def yaml_of(package, path):
    return package("yaml").safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.deploy
@pytest.mark.timeout(600)
def test_ansible_lint_reports_no_findings(tool, deploy, tmp_path):
    done = subprocess.run(
        [tool("ansible-lint"), "--offline", "--profile", "production", "--strict", "."],
        cwd=shutil.copytree(deploy / "ansible", tmp_path / "ansible"), env=environment(tmp_path),
        capture_output=True, text=True, timeout=540, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.deploy
def test_variables_are_documented_with_their_defaults(package, deploy):
    role = deploy / f"ansible/roles/{ROLE}"
    entries = yaml_of(package, role / "meta/argument_specs.yml")["argument_specs"]
    described = {
        name: option["default"]
        for entry in entries.values()
        for name, option in entry["options"].items()
        if not option.get("required")
    }
    assert yaml_of(package, role / "defaults/main.yml") == described
    options = entries["main"]["options"]
    example = yaml_of(package, deploy / "ansible/inventory.example.yml")[ROLE]
    named = {*example["vars"], *(name for host in example["hosts"].values() for name in host or {})}
    assert named <= set(options)
    assert {name for name, option in options.items() if option.get("required")} <= named


# ---- machines -------------------------------------------------------------------------------------------------------


def page(checkout):
    return (checkout / "docs/operate/rollout.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def removals(checkout):
    """Return the removal commands of the page as argument lists: one VM, all VMs, and a purge."""
    text = (checkout / "docs/operate/fleet.md").read_text(encoding="utf-8")
    lines = doc_pages.marked(text, "ansible: remove").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith("ansible-p")]


@pytest.fixture(scope="module")
def shown(checkout, tool):
    """Return the commands of the page as argument lists: check, roll out, roll back."""
    tool("ansible-playbook")
    lines = doc_pages.marked(page(checkout), "ansible: rollout").splitlines()
    check, roll_out, go_back = [shlex.split(line, comments=True) for line in lines if line.startswith("ansible-p")]
    return check, roll_out, [word.replace("0.2.0", NEW) for word in go_back]


def turn_into(tree, version, path):
    """Pack the unpacked archive *tree* into the archive *path*, with the version changed to *version*."""
    (wheel,) = tree.glob("wheels/scheduled_events_bridge-*.whl")
    before = wheel.name.split("-")[1]
    renamed = wheel.with_name(wheel.name.replace(f"-{before}-", f"-{version}-"))
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(renamed, "w") as target:
        for name in source.namelist():
            body = source.read(name)
            if ".dist-info/" in name:  # RECORD keeps the old hash of METADATA: pip does not check it
                body = body.replace(f"_bridge-{before}.dist-info".encode(), f"_bridge-{version}.dist-info".encode())
                body = body.replace(f"\nVersion: {before}\n".encode(), f"\nVersion: {version}\n".encode())
            target.writestr(name.replace(f"_bridge-{before}.dist-info", f"_bridge-{version}.dist-info"), body)
    pinned, old_hash = f"{NAME}=={before}", hashlib.sha256(wheel.read_bytes()).hexdigest()
    wheel.unlink()
    lines = (tree / "requirements.txt").read_text()
    assert pinned in lines
    lines = lines.replace(pinned, f"{NAME}=={version}")
    lines = lines.replace(old_hash, hashlib.sha256(renamed.read_bytes()).hexdigest())
    (tree / "requirements.txt").write_text(lines)
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        tar.add(tree, path.name.removesuffix(".tar.gz"))


class Made(NamedTuple):
    """The files for the machines: the archives of the versions *old* and NEW, and the files that drive.sh needs."""

    old: str
    archives: Path
    goods: Path


@pytest.fixture(scope="module")
def made(own_archive, bare, tmp_path_factory):
    """Return the archives of two versions. The first version is installed for drive.sh."""
    archives, goods, unpacked = (tmp_path_factory.mktemp(name) for name in ("archives", "goods", "unpacked"))
    shutil.copy(own_archive, archives)
    with tarfile.open(own_archive) as tar:
        tar.extractall(unpacked)
    (tree,) = unpacked.iterdir()
    shutil.copy(HERE / "ansible/drive.sh", goods)
    below = ["bash", HERE / "ansible/install_below.sh", bare, tree, goods / "before"]
    done = subprocess.run(below, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    old = own_archive.name.removeprefix(f"{NAME}-").split("-")[0]
    turn_into(tree, NEW, archives / own_archive.name.replace(old, NEW))
    return Made(old, archives, goods)


@pytest.fixture
def fleet(made, bare, playbooks, tmp_path):
    with contextlib.ExitStack() as stack:
        found = Fleet(tmp_path, playbooks, made.archives, bare=bare, goods=made.goods)
        stack.callback(found.stop)
        yield found


# ---- no machine ---------------------------------------------------------------------------------------------------


@pytest.mark.deploy
def test_unreachable_first_machine_ends_the_rollout(playbooks, shown, tmp_path):
    _, roll_out, _ = shown
    fleet = Fleet(tmp_path, playbooks, tmp_path)
    fleet.names += ["one", "two"]  # and starts neither
    done = fleet.play(roll_out, NEW)
    assert (done.code, set(done.recap), done.total("unreachable")) == (4, {"one"}, 1)


# ---- three machines --------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_rollout_stops_at_the_failed_ring_and_rolls_back(fleet, made, shown):
    check, roll_out, go_back = shown
    fleet.start("one", with_version_before=False)
    fleet.start("two", with_version_before=True)
    fleet.start("three", with_version_before=True)
    fleet.wait_until_up()
    fleet.on("three", f"chown root:{NAME} {ETC}/config.toml && chmod 0640 {ETC}/config.toml")
    fleet.wait_until_ready("two", "three")
    states = {name: fleet.state(name) for name in fleet.names}
    old_config = fleet.on("two", f"cat {ETC}/config.toml")

    done = fleet.play(check, NEW)
    assert done.code == 0
    assert all(figures["changed"] for figures in done.recap.values())
    assert {name: fleet.state(name) for name in fleet.names} == states, "a check changes nothing"

    done = fleet.play(roll_out, NEW, "--diff", of_host={"two": "never-ready"})
    assert done.code == 2
    assert set(done.recap) == {"one", "two"}, "the rollout does not continue after the failed ring"
    assert fleet.readyz("one") == (200, NEW)
    assert fleet.on("one", f"stat -c '%a %U %G' {ETC}/token") == f"640 root {NAME}"
    assert SECRET not in done.said
    assert fleet.readyz("two") == (200, made.old)
    assert fleet.on("two", f"cat {ETC}/config.toml") == old_config
    assert "IMDS has not responded yet" in done.said
    assert f"Rolled back: {made.old} runs as before, and is ready." in done.said
    assert fleet.state("three") == states["three"]

    again = fleet.play(roll_out, NEW, "--limit", "one")
    assert (again.code, again.total("changed")) == (0, 0)
    refused = fleet.play(roll_out, NEW, "--limit", "one", config="refused")
    assert (refused.code, fleet.readyz("one")) == (2, (200, NEW))
    assert f"Nothing was changed: {NEW} runs as before, and is ready." in refused.said
    assert "no_such_key" in refused.said
    # A configuration that prevents readiness is rolled back too, and leaves no second file.
    in_vain = fleet.play(roll_out, NEW, "--limit", "one", config="never-ready")
    assert (in_vain.code, fleet.readyz("one")) == (2, (200, NEW))
    assert f"Rolled back: {NEW} runs as before, and is ready." in in_vain.said
    assert fleet.on("one", f"cat {ETC}/config.toml").strip() == CONFIGURATIONS["good"].strip()
    assert fleet.on("one", f"ls {ETC}").split() == ["config.toml", "token"]

    assert fleet.play(roll_out, NEW, "--limit", "three").code == 0
    assert fleet.readyz("three") == (200, NEW)
    assert not fleet.on("three", f"find /opt/{NAME} -name config.toml -perm /o=r"), "a copy that other users can read"
    back = fleet.play(go_back, NEW, "--limit", "two,three")
    assert (back.code, back.recap["two"]["changed"]) == (0, 0)
    assert fleet.readyz("three") == (200, made.old)
    assert fleet.on("three", f"cat {ETC}/config.toml") == old_config
    assert fleet.on("three", f"stat -c '%a %U %G' {ETC}/config.toml") == f"640 root {NAME}"
    again = fleet.play(go_back, NEW, "--limit", "three")
    assert (again.code, again.total("changed")) == (0, 0)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_upgrade_ignores_a_failing_destination_but_no_new_problem(fleet, made, shown):
    _, roll_out, go_back = shown
    fleet.start("one", with_version_before=True)
    fleet.wait_until_up()
    fleet.wait_until_ready("one")
    fleet.configure("one", "refusing-sink")
    fleet.announce("one")
    fleet.wait_until_not_ready("one")

    done = fleet.play(roll_out, NEW, config="refusing-sink")
    assert (done.code, fleet.readyz("one")) == (0, (503, NEW))
    assert "The agent is not ready, as before the change: Sink refusing needs attention." in done.said
    again = fleet.play(roll_out, NEW, config="refusing-sink")
    assert (again.code, again.total("changed")) == (0, 0)

    broken = fleet.play(roll_out, NEW, config="refusing-sink-never-ready")
    assert (broken.code, fleet.readyz("one")) == (2, (503, NEW))
    assert f"Rolled back: {NEW} runs as before, and is as ready as before." in broken.said

    back = fleet.play(go_back, NEW, config="refusing-sink")
    assert (back.code, fleet.readyz("one")) == (0, (503, made.old))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_removal_handles_machines_with_and_without_the_agent(fleet, removals):
    first, every, purge = removals
    for name in ("one", "two", "three"):
        fleet.start(name, with_version_before=name != "three")
    fleet.wait_until_up()
    fleet.wait_until_ready("one", "two")
    left = f"find /opt /etc /usr /var/lib -path '*{NAME}*' -not -path '/var/lib/systemd/*'"
    states = {name: fleet.state(name) for name in fleet.names}
    assert fleet.play(every, NEW, "--check").code == 0
    assert {name: fleet.state(name) for name in fleet.names} == states, "a check changes nothing"

    done = fleet.play(first, NEW)
    assert (done.code, set(done.recap)) == (0, {"one"})
    assert (fleet.readyz("one"), fleet.readyz("two")[0]) == ((0, ""), 200)
    assert set(fleet.on("one", left).split()) > {ETC, f"{ETC}/config.toml", f"/var/lib/{NAME}"}
    assert not fleet.on("one", f"ls -d /opt/{NAME} /etc/systemd/system/{NAME}.service 2>/dev/null")
    done = fleet.play(every, NEW)
    assert (done.code, {name: figures["changed"] for name, figures in done.recap.items()}) == (
        0,
        {"one": 0, "two": 1, "three": 0},
    )
    # The role does not remove the files of a package.
    fleet.on("two", f"mkdir -p /usr/lib/{NAME}")
    done = fleet.play(purge, NEW)
    assert (done.code, [done.recap[name]["failed"] for name in fleet.names]) == (2, [0, 1, 0])
    assert "two has the agent from a package" in done.said
    assert [fleet.on(name, f"{left}; id -u {NAME} 2>/dev/null") for name in ("one", "three")] == ["", ""]


# ---- ten of them ----------------------------------------------------------------------------------------------------
