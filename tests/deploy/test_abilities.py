"""What becomes of a test whose machine lacks something: where all is required, nothing is skipped in silence."""

import os

import pytest

pytestmark = pytest.mark.deploy

REFUSED = "unshare: unshare failed: Operation not permitted\n"
#: What NotHere and mount say together, without the right to mount and without the right to a loop device.
NO_MOUNT = "Command '('mount', '-o', 'loop', 'disk.img', 'disk')' returned 32. mount: /disk: permission denied.\n"
NO_LOOP = "mount: /x: failed to setup loop device for /disk.img: Permission denied.\n"
BROKEN = [
    "mount: /x/mounted: wrong fs type, bad option, bad superblock on overlay.\n",
    "mkdir: cannot create directory '/sys/fs/cgroup/x': Operation not permitted\n",
    "mount: /x: failed to setup loop device for /disk.img: No such file or directory.\n",
    "",
]


@pytest.fixture(params=["required", "optional"])
def required(request, monkeypatch):
    monkeypatch.setenv("DEPLOY_TOOLS", request.param)
    return request.param == "required"


def as_user(monkeypatch, number):
    monkeypatch.setattr(os, "geteuid", lambda: number, raising=False)


@pytest.mark.parametrize("said", BROKEN)
def test_root_must_be_able_to_where_it_is_required(unable, monkeypatch, required, said):
    as_user(monkeypatch, 0)
    ending = pytest.fail.Exception if required else pytest.skip.Exception
    with pytest.raises(ending, match="no overlays"):
        unable("no overlays", said)


@pytest.mark.usefixtures("required")
@pytest.mark.parametrize(
    ("said", "named"),
    [
        (REFUSED, r"unshare \(EPERM\)"),
        (f"a\n{REFUSED}", "EPERM"),
        (NO_LOOP, r"loop devices \(EACCES\)"),
        (NO_MOUNT, "loop devices"),
    ],
)
def test_what_the_kernel_refuses_to_root_is_skipped_with_its_errno(unable, monkeypatch, said, named):
    as_user(monkeypatch, 0)
    with pytest.raises(pytest.skip.Exception, match=named):
        unable("no overlays", said)


@pytest.mark.usefixtures("required")
@pytest.mark.parametrize("said", [*BROKEN, REFUSED])
def test_others_than_root_may_lack_it(unable, monkeypatch, said):
    as_user(monkeypatch, 1000)
    with pytest.raises(pytest.skip.Exception, match="only root can"):
        unable("no overlays", said)
