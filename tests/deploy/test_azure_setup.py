"""The first boot of a VM of the Bicep template: cloud-init, the setup script, and the state disk."""

import base64
import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from bicep import AZURE, declared, literal, text

from bridge.config import loader
from bridge.config.settings import StatusSettings

pytestmark = pytest.mark.deploy

SAMPLE = {
    "eventHubsHost": "fleet.servicebus.windows.net",
    "eventHubName": "scheduled-events",
    "identityClientId": "6a9e4c1e-0d5c-4c41-9d8a-0d1f6d2a7b11",
    "wheelUrl": "https://example.net/scheduled_events_bridge-0.1.0-py3-none-any.whl?sig=a%2Bb&se=2027",
    "wheelSha256": "0" * 64,
}


def evaluate(node, names):
    """Return the text of an expression. Only the functions that assemble files are supported."""
    if node.type == "identifier":
        return names[text(node)] if isinstance(names[text(node)], str) else evaluate(names[text(node)], names)
    if node.type == "string":
        return literal(node)
    function = text(node.child_by_field_name("function"))
    arguments = [evaluate(child, names) for child in node.child_by_field_name("arguments").named_children]
    if function == "replace":
        assert arguments[1] in arguments[0], f"{arguments[1]} is not in the text"
        return arguments[0].replace(arguments[1], arguments[2])
    if function == "base64":
        return base64.b64encode(arguments[0].encode()).decode()
    content = (AZURE / arguments[0]).read_bytes()
    return content.decode() if function == "loadTextContent" else base64.b64encode(content).decode()


@pytest.fixture
def cloud_init(parse):
    """Return the custom data of a VM."""
    root = parse("scaleset.bicep")
    variables = {name: node.named_children[1] for name, node in declared(root, "variable").items()}
    disk = literal(declared(parse("main.bicep"), "parameter")["stateDisk"].named_children[2])
    return evaluate(variables["cloudInit"], {**variables, **SAMPLE, "stateDisk": disk})


@pytest.fixture
def written(cloud_init, package):
    """Return the files that cloud-init writes, by name."""
    files = package("yaml").safe_load(cloud_init)["write_files"]
    assert {file["encoding"] for file in files} == {"b64"}
    assert {file["permissions"] for file in files if file["path"].endswith(".sh")} == {"0755"}
    assert {str(Path(file["path"]).parent) for file in files} == {"/opt/scheduled-events-bridge/setup"}
    return {Path(file["path"]).name: base64.b64decode(file["content"], validate=True) for file in files}


def test_cloud_init_accepts_the_custom_data(cloud_init, tool, tmp_path):
    assert "{{" not in cloud_init
    # Azure accepts 64 KiB (Microsoft, "Custom data and cloud-init on Azure Virtual Machines").
    assert len(cloud_init.encode()) < 64 * 1024
    path = tmp_path / "user-data"
    path.write_text(cloud_init, encoding="utf-8")
    judged = subprocess.run(
        [tool("cloud-init"), "schema", "--config-file", str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert judged.returncode == 0, judged.stdout + judged.stderr
    assert "deprecat" not in (judged.stdout + judged.stderr).lower()


def test_cloud_init_writes_every_file_that_the_installer_reads(written):
    wanted = set(re.findall(r'"\$here/([^"$]*|\$name[^"$]*)"', (AZURE.parent / "systemd" / "install.sh").read_text()))
    wanted -= {"built-for", "requirements.txt", "wheels"}  # only in the archive of a release
    assert {name.replace("$name", "scheduled-events-bridge") for name in wanted} <= set(written)
    ours = ("install.sh", "try_tree.py", "scheduled-events-bridge.service", "scheduled-events-bridge.sysusers.conf")
    for name in ours:
        assert written[name] == (AZURE.parent / "systemd" / name).read_bytes()


def test_config_file_sends_records_to_the_event_hub(written, tmp_path):
    path = tmp_path / "config.toml"
    path.write_bytes(written["config.toml"])
    settings = loader.load(path)
    (sink,) = settings.sinks
    assert sink.type_name == "eventhubs"
    assert sink.config.fully_qualified_namespace == SAMPLE["eventHubsHost"]
    assert sink.config.eventhub == SAMPLE["eventHubName"]
    assert sink.config.client_id == SAMPLE["identityClientId"]
    assert sink.config.heartbeat
    assert settings.heartbeat.interval_seconds > 0
    # The health extension uses the default address, and the disk is mounted at the default state directory.
    assert settings.status == StatusSettings()
    assert settings.state.directory is None


@pytest.fixture
def set_up_disk(tool, tmp_path):
    """Return a function that runs the disk part of the setup, with a file in place of a disk."""
    path = f"{tmp_path / 'bin'}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    for needed in ("blkid", "mkfs.ext4"):
        shutil.which(needed, path=path) or tool(needed)
    (tmp_path / "bin").mkdir()
    stop = tmp_path / "bin" / "mkdir"  # the steps after the formatting would change this machine
    stop.write_text("#!/bin/sh\nexit 99\n")
    stop.chmod(0o755)
    sleep = tmp_path / "bin" / "sleep"  # the disk "late" appears after some calls, and the test never waits
    sleep.write_text(
        f"#!/bin/sh\nprintf x >>{tmp_path}/slept\n"
        f'[ "$(wc -c <{tmp_path}/slept)" -ne 9 ] || truncate --size 8M {tmp_path}/late\n'
    )
    sleep.chmod(0o755)
    shutil.copy(sleep, tmp_path / "bin" / "udevadm").write_text("#!/bin/sh\nexit 1\n")

    def run(disk, url="https://example.net/a.whl", digest="0" * 64, setup=AZURE / "setup.sh"):
        command = [str(setup), url, digest, str(disk)]
        return subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, check=False, timeout=60)

    def told(disk, tag):
        command = ["blkid", "-p", "-o", "value", "-s", tag, str(disk)]
        return subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, check=False).stdout.strip()

    return run, told


@pytest.mark.parametrize("name", ["scheduled-events-bridge-0.1.0-linux-x86_64.tar.gz", "a-0.1.0-py3-none-any.whl"])
def test_setup_uses_the_installer_of_the_archive_or_its_own_for_a_wheel(set_up_disk, tmp_path, name):
    run, _ = set_up_disk
    installer = f'#!/bin/sh\nprintf "%s %s\\n" "$0" "$*" >>{tmp_path}/installed\n'
    tree, here = tmp_path / "tree/scheduled-events-bridge-0.1.0-linux-x86_64", tmp_path / "setup"
    for directory in (tree, here):
        directory.mkdir(parents=True)
        (directory / "install.sh").write_text(installer)
        (directory / "install.sh").chmod(0o755)
        (directory / "config.toml").write_text(f"# {directory.name}\n")
    shutil.copy(AZURE / "setup.sh", here)
    (tmp_path / "goods").mkdir()
    goods = tmp_path / "goods" / name
    if name.endswith(".gz"):
        subprocess.run(["tar", "-C", tree.parent, "-czf", goods, tree.name], check=True, timeout=60)
    else:
        goods.write_bytes(b"a wheel")
    (tmp_path / "disk").write_bytes(bytes(8 * 1024 * 1024))
    # The stand-ins prevent changes to this machine: the fstab has the line, the disk is mounted, directories exist.
    for program, lines in {
        "grep": "exit 0",
        "mountpoint": "exit 0",
        "systemctl": "exit 0",
        "curl": f'while [ "$1" != --output ]; do shift; done; cp {goods} "$2"',
        "mkdir": f'case "$*" in *{tmp_path}*) exec /bin/mkdir "$@" ;; esac',
    }.items():
        (tmp_path / "bin" / program).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / "bin" / program).chmod(0o755)
    url, digest = f"https://example.net/{name}?sig=a", hashlib.sha256(goods.read_bytes()).hexdigest()
    assert run(tmp_path / "disk", url, "0" * 64, setup=here / "setup.sh").returncode != 0
    assert not (tmp_path / "installed").exists()
    for _ in range(2):  # the setup is idempotent
        done = run(tmp_path / "disk", url, digest, setup=here / "setup.sh")
        assert done.returncode == 0, done.stderr
    how = f"{here}/archive/install.sh " if name.endswith(".gz") else f"{here}/install.sh {here}/{name}"
    assert (tmp_path / "installed").read_text().splitlines() == [how, how]
    if name.endswith(".gz"):
        assert (here / "archive/config.toml").read_text() == "# setup\n"


def test_only_an_empty_disk_is_formatted(set_up_disk, tmp_path):
    run, told = set_up_disk
    disk = tmp_path / "disk"
    disk.write_bytes(bytes(8 * 1024 * 1024))
    assert run(disk).returncode == 99
    assert (told(disk, "TYPE"), told(disk, "LABEL")) == ("ext4", "bridge-state")
    first = told(disk, "UUID")
    assert run(disk).returncode == 99
    assert told(disk, "UUID") == first


def test_missing_disk_fails_the_setup_after_a_wait_and_names_the_parameter(set_up_disk, tmp_path):
    run, _ = set_up_disk
    done = run(tmp_path / "absent")
    assert done.returncode == 1
    assert "stateDisk" in done.stderr
    assert len((tmp_path / "slept").read_text()) == 60
    assert not (tmp_path / "absent").exists()
