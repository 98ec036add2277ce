"""Files that other users can change: owners, modes, parent directories, sticky directories, and links."""

import os
import sys
from pathlib import Path

import pytest

from bridge.system.permissions import why_writable

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="access lists decide there")
needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away")

NOBODY = 65534


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "etc" / "config.toml"
    path.parent.mkdir(mode=0o755)
    path.write_text("")
    path.chmod(0o644)
    return path


def why(path, *users, mounts=Path("/nowhere")):
    return why_writable(path, users=users or (os.geteuid(),), mounts=mounts) or ""


@pytest.mark.parametrize("mode", [0o644, 0o600])
def test_file_writable_only_by_its_owner_is_accepted(file, mode):
    file.chmod(mode)
    assert why(file) == ""


@pytest.mark.parametrize(("mode", "who"), [(0o664, "Its group"), (0o646, "Every user")])
def test_file_writable_by_others_is_rejected(file, mode, who):
    file.chmod(mode)
    assert f"{who} can write to {file}: its mode is {mode:04o}" in why(file)


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_file_in_a_directory_writable_by_others_is_rejected(file, mode):
    file.parent.chmod(mode)
    assert f"can write to {file.parent}:" in why(file)


def test_file_of_the_owner_in_a_sticky_directory_is_accepted(file):
    file.parent.chmod(0o1777)
    assert why(file) == ""


@needs_root
def test_file_of_another_user_in_a_sticky_directory_is_rejected(file):
    file.parent.chmod(0o1777)
    os.chown(file, NOBODY, NOBODY)
    assert f"{file} belongs to " in why(file)
    assert why(file, NOBODY) == ""


def test_symbolic_link_and_its_target_are_both_checked(file, tmp_path):
    link = tmp_path / "links" / "config.toml"
    link.parent.mkdir(mode=0o755)
    link.symlink_to(Path("..") / "etc" / "config.toml")
    assert why(link) == ""
    link.parent.chmod(0o777)
    assert f"can write to {link.parent}:" in why(link)
    link.parent.chmod(0o755)
    file.parent.chmod(0o777)
    assert f"can write to {file.parent}:" in why(link)


@needs_root
def test_symbolic_link_of_another_user_is_rejected(file, tmp_path):
    link = tmp_path / "tmp" / "config.toml"
    link.parent.mkdir()
    link.parent.chmod(0o1777)
    link.symlink_to(file)
    os.lchown(link, NOBODY, NOBODY)
    assert f"{link} belongs to " in why(link)


def test_symbolic_link_loop_is_reported(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert "too many symbolic links" in why(tmp_path / "a")


def test_kubernetes_config_map_is_accepted_despite_its_mode(file, tmp_path):
    file.parent.chmod(0o2777)
    mounts = tmp_path / "mountinfo"
    place = "/var/lib/kubelet/pods/6a3f/volumes/kubernetes.io~{}/config"
    mounts.write_text(f"1 2 8:1 {place.format('configmap')} {file.parent} ro,relatime - ext4 /dev/sda1 rw\n")
    assert why(file, mounts=mounts) == ""
    mounts.write_text(f"1 2 8:1 {place.format('empty-dir')} {file.parent} rw,relatime - ext4 /dev/sda1 rw\n")
    assert "Every user can write" in why(file, mounts=mounts)
