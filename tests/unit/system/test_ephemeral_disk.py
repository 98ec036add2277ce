"""Detection of storage that a redeploy erases: memory, container layers, emptyDirs, and the temporary disk."""

import os
import sys
from pathlib import Path

import pytest

from bridge.system.ephemeral_disk import why_ephemeral

MARK = "DATALOSS_WARNING_README.txt"

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads mounts of Linux")


class Machine:
    """A Linux machine below a directory."""

    def __init__(self, root):
        self.root = root
        self.lines = []
        (root / "proc/self").mkdir(parents=True)
        self.mount("/", "8:1")

    def mount(self, point, device, *, kind="ext4", top="/"):
        escaped = point.replace(" ", "\\040")
        self.lines.append(f"{len(self.lines) + 1} 1 {device} {top} {escaped} rw shared:1 - {kind} source rw\n")
        (self.root / "proc/self/mountinfo").write_text("".join(self.lines), encoding="utf-8")
        (self.root / point[1:]).mkdir(parents=True, exist_ok=True)

    def why(self, directory):
        return why_ephemeral(Path(directory), root=self.root)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path / "the root [of it]")


def test_ordinary_and_data_disks_survive(machine):
    machine.mount("/data", "8:33")
    assert machine.why("/var/lib/bridge") is None
    assert machine.why("/data/bridge") is None


def test_temporary_disk_is_found_by_the_file_at_its_root(machine):
    machine.mount("/mnt/my disk", "8:17")
    (machine.root / "mnt/my disk" / MARK).touch()
    assert machine.why("/mnt/my disk/state") == (
        "/mnt/my disk/state is on Azure's temporary disk, which is empty after a redeploy, a resize, or a "
        "deallocation (/mnt/my disk). Set state.directory to a disk that survives a redeploy. With systemd, add the "
        "directory to ReadWritePaths= of the unit."
    )


@pytest.mark.parametrize(
    ("kind", "top", "expected"),
    [
        ("tmpfs", "/", "in memory (tmpfs at /state)"),
        ("overlay", "/", "in the layer of a container"),
        ("ext4", "/var/lib/kubelet/pods/1-2/volumes/kubernetes.io~empty-dir/state", "emptyDir"),
    ],
)
def test_memory_layers_and_empty_dirs_do_not_survive(machine, kind, top, expected):
    machine.mount("/state", "0:25", kind=kind, top=top)
    assert expected in machine.why("/state/bridge")
    assert machine.why("/state2") is None


def test_mount_of_a_file_server_is_not_accessed(machine):
    machine.mount("/share", "0:70", kind="nfs4")
    (machine.root / "share" / MARK).touch()
    assert machine.why("/share/state") is None


def test_deepest_and_latest_mount_applies(machine):
    machine.mount("/data", "0:25", kind="tmpfs")
    machine.mount("/data", "8:33")
    assert machine.why("/data/state") is None
    machine.mount("/data/state", "0:26", kind="tmpfs")
    assert "tmpfs at /data/state" in machine.why("/data/state/x")


def test_symbolic_links_are_followed(machine, tmp_path):
    machine.mount(str(tmp_path / "memory"), "0:25", kind="tmpfs")
    (tmp_path / "memory").mkdir()
    (tmp_path / "state").symlink_to("memory")
    assert "in memory" in machine.why(tmp_path / "state/deeper")


def test_non_unicode_path_gives_a_message_that_can_be_logged(machine):
    machine.mount("/run", "0:25", kind="tmpfs")
    assert "in memory" in machine.why(Path(os.fsdecode(b"/run/\xff"))).encode().decode()


def test_without_mount_information_the_directory_counts_as_durable(tmp_path):
    assert why_ephemeral(Path("/var"), root=tmp_path) is None


def test_memory_file_system_of_this_machine_is_detected():
    assert "state.directory" in why_ephemeral(Path("/dev/shm"))
