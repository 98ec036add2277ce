import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.system.mounts import parse_mounts

ROOT = b"1 0 8:1 / / rw - ext4 /dev/sda1 rw"


def mounts_of(*lines):
    return parse_mounts(b"\n".join(lines) + b"\n")


def sources(mounts):
    return [mount.source for mount in mounts.all]


def test_every_field_is_read_whatever_the_number_of_optional_ones():
    for optional in (b"", b"shared:1 ", b"shared:1 master:2 propagate_from:3 unbindable "):
        (mount,) = mounts_of(
            b"36 35 98:0 /sub /mnt rw,noatime " + optional + b"- ext3 /dev/root rw,errors=continue"
        ).all
        assert (mount.mount_id, mount.parent_id, mount.number) == ("36", "35", "98:0")
        assert (mount.root, mount.point, mount.kind, mount.source) == ("/sub", "/mnt", "ext3", "/dev/root")


def test_octal_escapes_are_the_bytes_that_they_stand_for():
    (mount,) = mounts_of(rb"2 1 8:2 /a\040b /m\011n\012o\134p\043 rw - ext4 /dev/my\040disk rw").all
    assert (mount.root, mount.point, mount.source) == ("/a b", "/m\tn\no\\p#", "/dev/my disk")


def test_white_space_that_the_kernel_does_not_escape_belongs_to_the_path():
    path = "/a\rb\x0bb\x1cc\x85d\xa0e\u2028f"
    (mount,) = mounts_of(b"2 1 8:2 / " + path.encode() + b" rw - ext4 /dev/sdb rw").all
    assert mount.point == path


def test_an_empty_source_is_one():
    (mount,) = mounts_of(b"2 1 0:44 / /m rw - tmpfs  rw").all
    assert (mount.kind, mount.source) == ("tmpfs", "")


@pytest.mark.parametrize(
    "line",
    [b"", b"\xff\x00", b"1 2 3", b"2 1 8:2 / /m rw ext4 /dev/sdb rw", b"2 1 ../../x / /m rw - ext4 x rw", b" - - - "],
)
def test_a_line_that_is_no_mount_is_left_out(line):
    assert sources(mounts_of(line, ROOT)) == ["/dev/sda1"]


def test_the_deepest_mount_above_holds_a_path():
    mounts = mounts_of(ROOT, b"2 1 8:2 / /var rw - ext4 var rw", b"3 2 8:3 / /var/lib rw - ext4 lib rw")
    assert [mounts.holding(path).source for path in ("/", "/etc", "/var", "/var/log", "/var/lib", "/var/lib/a/b")] == [
        *("/dev/sda1", "/dev/sda1", "var", "var", "lib", "lib")
    ]


def test_a_name_that_only_begins_alike_is_another_directory():
    mounts = mounts_of(ROOT, b"2 1 8:2 / /mnt rw - ext4 mnt rw")
    assert mounts.holding("/mnt2/a").source == "/dev/sda1"


def test_the_later_of_two_mounts_on_one_point_covers_the_earlier():
    mounts = mounts_of(ROOT, b"2 1 8:2 / /data rw - ext4 below rw", b"3 2 8:3 / /data rw - ext4 above rw")
    assert mounts.holding("/data/a").source == "above"


def test_the_last_line_counts_where_two_mounts_claim_the_same_place():
    mounts = mounts_of(ROOT, b"2 1 8:2 / /data rw - ext4 first rw", b"3 1 8:3 / /data rw - ext4 last rw")
    assert mounts.holding("/data/a").source == "last"


def test_a_mount_covers_all_that_lay_below_its_point():
    mounts = mounts_of(ROOT, b"2 1 8:2 / /data/state rw - ext4 hidden rw", b"3 1 8:3 / /data rw - ext4 above rw")
    assert mounts.holding("/data/state/a").source == "above"


def test_the_order_of_the_lines_does_not_decide():
    mounts = mounts_of(b"3 2 8:3 / /data rw - ext4 above rw", b"2 1 8:2 / /data rw - ext4 below rw", ROOT)
    assert mounts.holding("/data").source == "above"


def test_the_root_of_an_initramfs_lies_below_the_real_one():
    mounts = mounts_of(b"1 1 0:1 / / rw - rootfs rootfs rw", b"20 1 8:1 / / rw - ext4 real rw")
    assert mounts.holding("/var").source == "real"


def test_where_a_process_has_another_root_its_parents_are_not_listed():
    mounts = mounts_of(b"90 40 8:2 / /var rw - ext4 var rw", b"91 90 8:3 / /var/lib rw - ext4 lib rw")
    assert mounts.holding("/etc") is None
    assert mounts.holding("/var/lib/x").source == "lib"


@pytest.mark.timeout(20)
def test_ids_that_go_in_a_circle_come_to_an_end():
    mounts = mounts_of(b"1 2 8:1 / / rw - ext4 a rw", b"2 1 8:1 / / rw - ext4 b rw", b"3 3 8:1 / /x rw - ext4 c rw")
    mounts.holding("/x/y")


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=60),
            st.lists(
                st.sampled_from([b"1", b"2", b"8:1", b"0:9", b"/", b"/a", b"/a/b", rb"\040", rb"\999", b"-", b""])
            ).map(b" ".join),
            st.builds(
                b"%b %b 8:%b / %b rw - ext4 x rw".__mod__,
                st.tuples(
                    *[st.sampled_from([b"1", b"2", b"3"])] * 3, st.sampled_from([b"/", b"/a", b"/a/b", b"a", b""])
                ),
            ),
        )
    )
)
def test_no_text_makes_it_raise_and_only_a_listed_mount_is_found(lines):
    mounts = mounts_of(*lines)
    for path in ("/", "/a", "/a/b/c"):
        assert mounts.holding(path) in {None, *mounts.all}
