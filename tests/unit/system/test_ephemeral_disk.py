import logging
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.system.ephemeral_disk import EphemeralDiskWatch, reason_on_windows, why_ephemeral

MARK = "DATALOSS_WARNING_README.txt"

on_posix = pytest.mark.skipif(sys.platform == "win32", reason="the tree has names that Windows does not allow")


class Tree:
    """A Linux machine below a directory: its mounts, its devices in sysfs, its links in /dev."""

    def __init__(self, root):
        self.root = root
        self.lines = []
        (root / "proc/self").mkdir(parents=True)
        self.mount("/", "8:1", "/dev/sda1")

    def mount(self, point, number, source, *, kind="ext4", top="/", over=1):
        """Mount, with the id that is the count of mounts, over the mount that has the id *over*."""
        escaped = point.replace(" ", "\\040")
        self.lines.append(f"{len(self.lines) + 1} {over} {number} {top} {escaped} rw shared:1 - {kind} {source} rw\n")
        self.lines[0] = self.lines[0].replace("1 1 ", "1 0 ", 1)
        (self.root / "proc/self/mountinfo").write_text("".join(self.lines), encoding="utf-8")
        (self.root / point[1:]).mkdir(parents=True, exist_ok=True)

    def device(self, number, path, **files):
        """Put a block device into sysfs."""
        directory = self.root / "sys" / path
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name).write_text(text)
        self.link(f"sys/dev/block/{number}", directory)
        self.link(f"sys/class/block/{directory.name}", directory)

    def link(self, path, target):
        """Make a relative link, as udev and sysfs do."""
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(target, link.parent))

    def why(self, directory, *, os_disk_is_ephemeral=None):
        return why_ephemeral(Path(directory), os_disk_is_ephemeral=os_disk_is_ephemeral, root=self.root)


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path / "the root [of it]")


@on_posix
def test_an_ordinary_disk_survives_and_so_does_a_data_disk(tree):
    tree.mount("/data", "8:33", "/dev/sdc1")
    for known in (None, False):
        assert tree.why("/var/lib/bridge", os_disk_is_ephemeral=known) is None
        assert tree.why("/data/bridge", os_disk_is_ephemeral=known) is None


@on_posix
def test_the_sentence_says_what_why_and_what_to_do(tree):
    tree.mount("/mnt/my disk", "8:17", "/dev/sdb1")
    (tree.root / "mnt/my disk" / MARK).touch()
    assert tree.why("/mnt/my disk/state") == (
        "/mnt/my disk/state is on Azure's temporary disk, which is empty after a redeploy, a resize, or a "
        "deallocation (/mnt/my disk). Set state.directory to a disk that survives a redeploy."
    )


@on_posix
def test_the_mark_counts_at_the_root_of_the_mount_only(tree):
    tree.mount("/data", "8:33", "/dev/sdc1")
    (tree.root / "data/backup").mkdir()
    (tree.root / "data/backup" / MARK).touch()
    assert tree.why("/data/backup/state") is None


@on_posix
@pytest.mark.parametrize("kind", ["tmpfs", "ramfs", "rootfs"])
def test_a_file_system_in_memory_does_not_survive(tree, kind):
    tree.mount("/run", "0:25", kind, kind=kind)
    assert f"in memory ({kind} at /run)" in tree.why("/run/bridge")


@on_posix
@pytest.mark.parametrize("kind", ["overlay", "aufs", "fuse.fuse-overlayfs", "squashfs"])
def test_a_containers_layer_does_not_survive_but_its_volume_does(tmp_path, kind):
    tree = Tree(tmp_path)
    tree.lines.clear()
    tree.mount("/", "0:90", "overlay", kind=kind)
    tree.mount("/var/lib/bridge", "8:1", "/dev/sda1", top="/var/lib/docker/volumes/bridge/_data")
    assert f"({kind} at /)" in tree.why("/tmp/state")
    assert tree.why("/var/lib/bridge") is None


@on_posix
def test_an_empty_dir_does_not_survive_its_pod(tree):
    tree.mount("/state", "8:1", "/dev/sda1", top="/var/lib/kubelet/pods/1-2/volumes/kubernetes.io~empty-dir/state")
    assert "emptyDir" in tree.why("/state")


@on_posix
@pytest.mark.parametrize(("known", "warns"), [(True, True), (False, False), (None, False)])
def test_what_lies_on_the_disk_of_the_root_goes_with_an_ephemeral_os_disk(tree, known, warns):
    tree.mount("/var/lib/bridge", "8:1", "/dev/sda1", top="/var/lib/private/bridge")
    for directory in ("/opt/state", "/var/lib/bridge"):
        assert ("ephemeral OS disk" in (tree.why(directory, os_disk_is_ephemeral=known) or "")) is warns


@on_posix
def test_another_partition_of_the_roots_disk_goes_with_an_ephemeral_os_disk_and_a_data_disk_does_not(tree):
    tree.device("8:1", "devices/sda/sda1", partition="1")
    tree.device("8:2", "devices/sda/sda2", partition="2")
    tree.device("8:33", "devices/sdc/sdc1", partition="1")
    tree.mount("/var", "8:2", "/dev/sda2")
    tree.mount("/data", "8:33", "/dev/sdc1")
    assert "ephemeral OS disk" in tree.why("/var/lib/bridge", os_disk_is_ephemeral=True)
    assert tree.why("/data/bridge", os_disk_is_ephemeral=True) is None


@on_posix
def test_a_logical_volume_beside_that_of_the_root_goes_with_an_ephemeral_os_disk(tree):
    tree.lines[0] = tree.lines[0].replace("8:1", "253:0")
    tree.device("8:4", "devices/sda/sda4", partition="4")
    for minor, name in enumerate(["dm-0", "dm-1"]):
        tree.device(f"253:{minor}", f"devices/virtual/block/{name}")
        tree.link(f"sys/devices/virtual/block/{name}/slaves/sda4", tree.root / "sys/devices/sda/sda4")
    tree.mount("/var", "253:1", "/dev/mapper/rootvg-varlv")
    assert "ephemeral OS disk" in tree.why("/var/lib/bridge", os_disk_is_ephemeral=True)


@on_posix
def test_in_a_container_the_os_disk_is_where_the_files_of_the_node_are(tree):
    tree.lines.clear()
    tree.mount("/", "0:90", "overlay", kind="overlay")
    tree.mount("/state", "8:1", "/dev/sda1", top="/var/lib/bridge")
    tree.mount("/data", "8:33", "/dev/sdc1")
    assert tree.why("/state", os_disk_is_ephemeral=True) is None
    tree.mount("/etc/hosts", "8:1", "/dev/sda1", top="/var/lib/kubelet/pods/1-2/etc-hosts")
    assert "ephemeral OS disk" in tree.why("/state", os_disk_is_ephemeral=True)
    assert tree.why("/data", os_disk_is_ephemeral=True) is None


@on_posix
@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.blobfuse2", "autofs", "9p", "virtiofs", "ceph"])
def test_nothing_is_asked_on_a_mount_that_a_server_answers_for(tree, kind):
    tree.mount("/share", "0:70", "server:/share", kind=kind)
    (tree.root / "share" / MARK).touch()
    assert tree.why("/share/state", os_disk_is_ephemeral=True) is None


@on_posix
def test_the_deepest_and_of_two_on_one_point_the_later_mount_counts(tree):
    tree.mount("/data", "0:25", "tmpfs", kind="tmpfs")
    assert "tmpfs at /data" in tree.why("/data")
    assert tree.why("/data2/state") is None
    tree.mount("/data", "8:33", "/dev/sdc1")
    assert tree.why("/data/state") is None
    tree.mount("/data/state", "0:26", "tmpfs", kind="tmpfs")
    assert "tmpfs at /data/state" in tree.why("/data/state/x")


@on_posix
def test_links_on_the_way_are_followed(tree, tmp_path):
    tree.mount(str(tmp_path / "memory"), "0:25", "tmpfs", kind="tmpfs")
    (tmp_path / "memory").mkdir()
    (tmp_path / "state").symlink_to("memory")
    assert "in memory" in tree.why(tmp_path / "state/deeper")


@on_posix
def test_a_path_that_is_no_unicode_makes_a_sentence_that_can_be_logged(tree):
    tree.mount("/run", "0:25", "tmpfs", kind="tmpfs")
    assert "in memory" in tree.why(Path(os.fsdecode(b"/run/\xff"))).encode().decode()


@on_posix
def test_where_the_system_does_not_tell_its_mounts_there_is_no_reason(tmp_path):
    assert why_ephemeral(Path("/var"), os_disk_is_ephemeral=True, root=tmp_path) is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads this machine's own mounts")
def test_the_shared_memory_of_this_machine_is_memory():
    assert "tmpfs at /dev/shm" in why_ephemeral(Path("/dev/shm/bridge"), os_disk_is_ephemeral=None)


@on_posix  # there a name with a backslash is a name; on Windows a drive takes the place of what stands before it
@pytest.mark.parametrize(
    ("drive", "is_on_ephemeral_os", "reason"),
    [
        ("D:", False, "temporary disk"),
        ("D:", True, "temporary disk"),
        ("C:", True, "ephemeral OS disk"),
        ("C:", False, None),
        ("C:", None, None),
        ("", True, None),
        (r"\\server\share", True, None),
    ],
)
def test_on_windows_the_mark_lies_at_the_root_of_the_drive(tmp_path, drive, is_on_ephemeral_os, reason):
    (tmp_path / "D:\\").mkdir()
    (tmp_path / "D:\\" / MARK).touch()
    said = reason_on_windows(drive, is_on_ephemeral_os=is_on_ephemeral_os, root=tmp_path)
    assert said is None if reason is None else f"({drive})" in said and reason in said


@on_posix
@given(
    text=st.lists(
        st.one_of(
            st.binary(max_size=80),
            st.builds(
                b"%b %b %b / %b rw - %b %b rw".__mod__,
                st.tuples(
                    st.sampled_from([b"1", b"2"]),
                    st.sampled_from([b"0", b"1", b"2"]),
                    st.sampled_from([b"8:1", b"0:1", b"999999999999:1"]),
                    st.sampled_from([b"/", b"/var", rb"/v\000r", b"", b"//deleted", b"\xff"]),
                    st.sampled_from([b"ext4", b"btrfs", b"nfs", b"tmpfs"]),
                    st.sampled_from([b"/dev/", b"/dev/..", b"/dev/sda1", rb"/dev/\000", b"", b"\xff"]),
                ),
            ),
        )
    ).map(b"\n".join)
)
def test_no_text_of_mounts_makes_it_raise(tmp_path_factory, text):
    root = tmp_path_factory.getbasetemp() / "any"
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/mountinfo").write_bytes(text)
    assert isinstance(why_ephemeral(Path("/var/lib"), os_disk_is_ephemeral=True, root=root), (str, type(None)))


def watch_of(directory, answers):
    shown = []
    watch = EphemeralDiskWatch(directory, os_disk_is_ephemeral=lambda: answers[-1], show=shown.append)
    return watch, shown


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads this machine's own mounts")
def test_memory_is_warned_of_once_and_shown(caplog):
    watch, shown = watch_of(Path("/dev/shm"), [None])
    for _ in range(3):
        watch.check()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "state.directory" in caplog.text
    assert shown == [True]


def test_what_imds_says_is_heard_and_not_forgotten_when_it_is_silent(caplog, tmp_path):
    answers = [None]
    watch, shown = watch_of(tmp_path, answers)
    watch.check()
    answers.append(True)
    watch.check()
    warned = len(caplog.records)
    answers.append(None)
    watch.check()
    assert shown[1:] == [why_ephemeral(tmp_path, os_disk_is_ephemeral=True) is not None]
    assert len(caplog.records) == warned
