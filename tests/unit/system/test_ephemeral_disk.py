import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.system.ephemeral_disk import parse_os_disk, reason_on_windows, why_ephemeral
from bridge.testing import Machine

MARK = "DATALOSS_WARNING_README.txt"
BUS = "devices/LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00"
GENERATION_1 = BUS + "/00000000-000{}-8899-0000-000000000000"
GENERATION_2 = BUS + "/f8b3781a-1e82-4818-a1c3-63d806ec15bb"
NVME = "devices/pci0000:00/0000:00:02.0/nvme/nvme0"

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

    def says(self, path, **files):
        """Let sysfs say something of what a device hangs on."""
        for name, text in files.items():
            (self.root / "sys" / path).mkdir(parents=True, exist_ok=True)
            (self.root / "sys" / path / name).write_text(text + "\n")

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
        "/mnt/my disk/state lies on Azure's temporary disk, which comes back empty after a redeploy, a resize or a "
        "deallocation (/mnt/my disk). Set state.directory to a disk that survives a redeploy."
    )


@on_posix
def test_the_mark_counts_at_the_root_of_the_mount_only(tree):
    tree.mount("/data", "8:33", "/dev/sdc1")
    (tree.root / "data/backup").mkdir()
    (tree.root / "data/backup" / MARK).touch()
    assert tree.why("/data/backup/state") is None


@on_posix
def test_a_bind_mount_of_the_temporary_disk_is_known_by_the_mark_at_its_own_root(tree):
    tree.mount("/mnt", "8:17", "/dev/sdb1")
    (tree.root / "mnt" / MARK).touch()
    tree.mount("/var/lib/bridge", "8:17", "/dev/sdb1", top="/bridge")
    assert "temporary disk" in tree.why("/var/lib/bridge/state")


@on_posix
def test_the_mark_in_another_directory_of_the_same_disk_says_nothing(tree):
    tree.mount("/old", "8:33", "/dev/sdc1", top="/copy-of-a-temporary-disk")
    (tree.root / "old" / MARK).touch()
    tree.mount("/var/lib/bridge", "8:33", "/dev/sdc1", top="/bridge")
    assert tree.why("/var/lib/bridge") is None


@on_posix
def test_the_mark_on_a_disk_that_covers_the_file_systems_root_says_nothing(tree):
    tree.mount("/mnt", "8:33", "/dev/sdc1")
    tree.mount("/var/lib/bridge", "8:33", "/dev/sdc1", top="/bridge")
    tree.mount("/mnt", "8:17", "/dev/sdb1", over=2)
    (tree.root / "mnt" / MARK).touch()
    assert tree.why("/var/lib/bridge") is None
    assert "temporary disk" in tree.why("/mnt/state")


@on_posix
@pytest.mark.parametrize(
    "link",
    [
        "disk/cloud/azure_resource-part1",
        "disk/cloud/azure_resource",
        "disk/azure/resource-part1",
        "disk/azure/local/by-index/1-part1",
        "disk/azure/local/by-name/nvme-110G-1",
        "disk/azure/local/by-serial/abc",
    ],
)
def test_the_links_of_udev_tell_the_temporary_disk(tree, link):
    tree.mount("/mnt", "8:17", "/dev/sdb1")
    tree.device("8:17", "devices/sdb/sdb1", partition="1")
    assert tree.why("/mnt/state") is None
    tree.link(f"dev/{link}", tree.root / "dev" / ("sdb1" if link.endswith("-part1") else "sdb"))
    assert "temporary disk" in tree.why("/mnt/state")
    assert tree.why("/var") is None


@on_posix
@pytest.mark.parametrize("source", ["/dev/sdb1", "/dev/mapper/vg-lv"])
def test_without_sysfs_the_source_of_the_mount_is_what_the_links_lead_to(tree, source):
    tree.mount("/mnt", "0:50", source, kind="btrfs")
    tree.link("dev/mapper/vg-lv", tree.root / "dev/sdb1")
    tree.link("dev/disk/azure/resource-part1", tree.root / "dev/sdb1")
    assert "temporary disk" in tree.why("/mnt/state")


@on_posix
@pytest.mark.parametrize("link", ["dev/disk/azure/data/by-lun/0-part1", "dev/disk/azure/root-part1"])
def test_a_link_of_another_disk_says_nothing(tree, link):
    tree.mount("/mnt", "8:17", "/dev/sdb1")
    tree.link(link, tree.root / "dev/sdb1")
    assert tree.why("/mnt/state") is None


@on_posix
@pytest.mark.parametrize(
    ("hangs_on", "device_id", "address", "is_temporary"),
    [
        (GENERATION_1.format(1), "{00000000-0001-8899-0000-000000000000}", "1:0:1:0", True),
        (GENERATION_1.format(0), "{00000000-0000-8899-0000-000000000000}", "0:0:0:0", False),
        (GENERATION_2, "{f8b3781a-1e82-4818-a1c3-63d806ec15bb}", "0:0:0:1", True),
        (GENERATION_2, "{F8B3781A-1E82-4818-A1C3-63D806EC15BB}", "0:0:0:1", True),
        (GENERATION_2, "{f8b3781a-1e82-4818-a1c3-63d806ec15bb}", "0:0:0:0", False),
        (GENERATION_2, "{f8b3781a-1e82-4818-a1c3-63d806ec15bb}", "0:0:0:2", False),
        (BUS + "/other", "{f8b3781b-1e82-4818-a1c3-63d806ec15bb}", "1:0:0:1", False),
    ],
)
def test_in_a_container_sysfs_tells_the_temporary_disk(tree, hangs_on, device_id, address, is_temporary):
    tree.says(hangs_on, device_id=device_id)
    tree.says(f"{hangs_on}/host0/target0:0:0/{address}", model="Virtual Disk")
    tree.device("8:17", f"{hangs_on}/host0/target0:0:0/{address}/block/sdb/sdb1", partition="1")
    tree.mount("/state", "8:17", "/dev/sdb1", top="/bridge")
    assert ("temporary disk" in (tree.why("/state") or "")) is is_temporary


@on_posix
@pytest.mark.parametrize("model", ["Microsoft NVMe Direct Disk", "Microsoft NVMe Direct Disk v2"])
def test_a_local_nvme_disk_is_a_temporary_one(tree, model):
    tree.says(NVME, model=model)
    tree.device("259:0", f"{NVME}/nvme0n1", nsid="1")
    tree.mount("/mnt", "259:0", "/dev/nvme0n1")
    assert "temporary disk" in tree.why("/mnt/state")


@on_posix
def test_a_remote_nvme_disk_is_none(tree):
    tree.says(NVME, model="MSFT NVMe Accelerator v1.0")
    tree.device("259:0", f"{NVME}/nvme0n2", nsid="2")
    tree.mount("/data", "259:0", "/dev/nvme0n2")
    assert tree.why("/data/state", os_disk_is_ephemeral=True) is None


@on_posix
def test_an_array_of_local_disks_is_a_temporary_disk(tree):
    tree.says(NVME, model="Microsoft NVMe Direct Disk v2")
    tree.device("259:0", f"{NVME}/nvme0n1", nsid="1")
    tree.device("259:1", f"{NVME}/nvme0n1/nvme0n1p1", partition="1")
    tree.device("9:127", "devices/virtual/block/md127")
    tree.link("sys/devices/virtual/block/md127/slaves/nvme0n1p1", tree.root / "sys" / NVME / "nvme0n1/nvme0n1p1")
    tree.mount("/mnt", "9:127", "/dev/md127", kind="xfs")
    assert "temporary disk" in tree.why("/mnt/state")


@on_posix
@pytest.mark.timeout(20)
def test_devices_that_are_made_of_each_other_come_to_an_end(tree):
    tree.device("253:0", "devices/virtual/block/dm-0")
    tree.device("253:1", "devices/virtual/block/dm-1")
    tree.link("sys/devices/virtual/block/dm-0/slaves/dm-1", tree.root / "sys/devices/virtual/block/dm-1")
    tree.link("sys/devices/virtual/block/dm-1/slaves/dm-0", tree.root / "sys/devices/virtual/block/dm-0")
    tree.mount("/data", "253:0", "/dev/mapper/a")
    assert tree.why("/data") is None


@on_posix
@pytest.mark.parametrize("kind", ["tmpfs", "ramfs", "rootfs"])
def test_a_file_system_in_memory_does_not_survive(tree, kind):
    tree.mount("/run", "0:25", kind, kind=kind)
    assert f"in memory ({kind} at /run)" in tree.why("/run/bridge")


@on_posix
def test_a_disk_made_of_memory_does_not_survive(tree):
    tree.device("252:0", "devices/virtual/block/zram0")
    tree.mount("/cache", "252:0", "/dev/zram0")
    assert "in memory" in tree.why("/cache")


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
def test_a_root_without_a_block_device_of_its_own_is_known_by_its_number(tree):
    tree.lines.clear()
    tree.mount("/", "0:30", "rpool/ROOT/debian", kind="zfs")
    tree.mount("/state", "0:30", "rpool/ROOT/debian", kind="zfs", top="/var/lib/bridge")
    tree.mount("/data", "0:31", "data", kind="zfs")
    assert "ephemeral OS disk" in tree.why("/state", os_disk_is_ephemeral=True)
    assert tree.why("/data", os_disk_is_ephemeral=True) is None


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
@pytest.mark.parametrize("is_nvme", [True, False])
def test_a_host_path_on_a_nodes_ephemeral_os_disk_is_known_from_sysfs(tree, is_nvme):
    tree.lines.clear()
    tree.mount("/", "0:90", "overlay", kind="overlay")
    if is_nvme:
        tree.says(NVME, model="MSFT NVMe Accelerator v1.0")
        tree.says(f"{NVME}/nvme0n1", nsid="1")
        tree.device("8:1", f"{NVME}/nvme0n1/nvme0n1p1", partition="1")
    else:
        tree.says(GENERATION_2, device_id="{f8b3781a-1e82-4818-a1c3-63d806ec15bb}")
        tree.device("8:1", f"{GENERATION_2}/host0/target0:0:0/0:0:0:0/block/sda/sda1", partition="1")
    tree.mount("/state", "8:1", "/dev/sda1", top="/var/lib/bridge")
    assert "ephemeral OS disk" in tree.why("/state", os_disk_is_ephemeral=True)
    assert tree.why("/state", os_disk_is_ephemeral=False) is None


@on_posix
@pytest.mark.parametrize("link", ["disk/azure/root-part1", "disk/azure/os-part1", "disk/cloud/azure_root-part1"])
def test_a_link_of_udev_tells_the_os_disk(tree, link):
    tree.mount("/state", "0:60", "/dev/sda1", kind="btrfs")
    tree.lines[0] = tree.lines[0].replace("8:1", "0:90").replace("ext4 /dev/sda1", "overlay overlay")
    tree.link(f"dev/{link}", tree.root / "dev/sda1")
    tree.mount("/other", "0:61", "/dev/sdz", kind="btrfs")
    assert "ephemeral OS disk" in tree.why("/state", os_disk_is_ephemeral=True)
    assert tree.why("/other", os_disk_is_ephemeral=True) is None


@on_posix
def test_links_on_the_way_are_followed_within_the_root(tree):
    tree.mount("/mnt/resource", "8:17", "/dev/sdb1")
    (tree.root / "mnt/resource" / MARK).touch()
    (tree.root / "srv").mkdir()
    (tree.root / "srv/absolute").symlink_to("/srv/relative/deep")
    (tree.root / "srv/relative").symlink_to("../mnt/./resource")
    assert "temporary disk" in tree.why("/srv/absolute/state")
    assert tree.why("/srv/absolute/../../../srv/state") is None


@on_posix
def test_a_link_away_from_the_temporary_disk_is_followed_too(tree):
    tree.mount("/mnt", "8:17", "/dev/sdb1")
    (tree.root / "mnt" / MARK).touch()
    (tree.root / "mnt/state").symlink_to("/var/lib/bridge")
    assert tree.why("/mnt/state") is None


@on_posix
def test_links_in_a_circle_are_no_reason(tree):
    (tree.root / "a").symlink_to("b")
    (tree.root / "b").symlink_to("a")
    assert tree.why("/a/state", os_disk_is_ephemeral=True) is None


@on_posix
@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.blobfuse2", "autofs", "9p", "virtiofs", "ceph"])
def test_nothing_is_asked_on_a_mount_that_a_server_answers_for(tree, kind):
    tree.mount("/share", "0:70", "server:/share", kind=kind)
    (tree.root / "share" / MARK).touch()
    # Whoever touches the mount would follow this link, and find a reason.
    tree.mount("/run", "0:25", "tmpfs", kind="tmpfs")
    (tree.root / "share/state").symlink_to("/run")
    assert tree.why("/share/state", os_disk_is_ephemeral=True) is None
    assert tree.why("/share", os_disk_is_ephemeral=True) is None


@on_posix
def test_a_relative_directory_counts_from_the_current_one(tree, monkeypatch):
    monkeypatch.chdir("/usr")
    tree.mount("/usr", "0:25", "tmpfs", kind="tmpfs")
    assert tree.why("bridge").startswith("bridge lies in memory")


@on_posix
def test_a_path_that_is_no_unicode_makes_a_sentence_that_can_be_logged(tree):
    tree.mount("/run", "0:25", "tmpfs", kind="tmpfs")
    assert "in memory" in tree.why(Path(os.fsdecode(b"/run/\xff"))).encode().decode()


@on_posix
@pytest.mark.parametrize("directory", ["/run/var\0/x", "/run/" + "n" * 5000, "/run/" + "a/" * 50_000])
@pytest.mark.timeout(20)
def test_a_path_that_no_system_takes_is_no_reason(tree, directory):
    tree.mount("/run", "0:25", "tmpfs", kind="tmpfs")
    assert tree.why(directory) is None


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


def instance(option):
    return json.dumps({"storageProfile": {"osDisk": {"diffDiskSettings": option}}}).encode()


@pytest.mark.parametrize(
    ("body", "is_ephemeral"),
    [
        (instance({"option": "Local"}), True),
        (instance({"option": "local"}), True),
        (instance({"option": ""}), False),
        (instance({"option": None}), False),
        (instance({}), False),
        (instance(None), False),
        (b'{"storageProfile": {"osDisk": {}}}', False),
        (json.dumps(Machine(name="vm").compute()).encode(), False),
        (json.dumps(Machine(name="vm", has_ephemeral_os_disk=True).compute()).encode(), True),
        (b'{"name": "vm"}', None),
        (b'{"storageProfile": null}', None),
        (b'{"storageProfile": {"osDisk": []}}', None),
        (b"[1]", None),
        (b"", None),
        (b"\xff", None),
        (b"[" * 100_000, None),
    ],
)
def test_the_instance_document_tells_whether_the_os_disk_is_ephemeral(body, is_ephemeral):
    assert parse_os_disk(body) is is_ephemeral


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
