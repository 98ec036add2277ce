"""The portal's image, built and run by the kit container_engine. docker/portal.sh runs in the container.

The tests take about a minute and run separately: pytest -m long tests/deploy/test_portal_container.py
"""

import email
import re
import shutil

import pytest
from container_engine import ENGINE, Builder, Image, context_of, read_stages, run_in_container

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

CONTAINER = ENGINE.with_name("portal.sh")
STATE = "/var/lib/scheduled-events-portal"


@pytest.fixture(scope="module")
def dockerfile(deploy):
    return deploy / "portal/Dockerfile"


@pytest.fixture(scope="module")
def image(dockerfile):
    return Image(read_stages(dockerfile.read_text()))


def locked(path):
    return dict(re.findall(r"(?m)^([a-z0-9-]+)==(\S+)", path.read_text()))


@pytest.fixture(scope="module")
def built(dockerfile, image, checkout, stand_in_engine, tmp_path_factory):
    """Return the builder, and the layer of the image."""
    layers = stand_in_engine(tmp_path_factory.mktemp("portal"))
    builder = Builder(context=context_of(dockerfile, checkout, layers / "context"), directory=layers)
    return builder, builder.build(image.stages)


@pytest.fixture(scope="module")
def facts(built, image, deploy, tmp_path_factory):
    """Return the results of the container script."""
    directory = tmp_path_factory.mktemp("container")
    shutil.copy(deploy / "portal/kubernetes/base/portal.toml", directory)
    builder, layer = built
    return run_in_container(builder, image, layer, CONTAINER, directory, volume=STATE)


def test_image_contains_compiled_locked_versions_without_pip(built, deploy):
    _, layer = built
    (packages,) = (layer / "root/opt/scheduled-events-portal/venv/lib").glob("python*/site-packages")
    found = {}
    for path in packages.glob("*.dist-info/METADATA"):
        said = email.message_from_string(path.read_text())
        found[re.sub("[-_.]+", "-", said["Name"]).lower()] = said["Version"]
    assert found.pop("scheduled-events-bridge")
    lock = locked(deploy / "portal/requirements.txt")
    assert {name: lock.get(name) for name in found} == found
    assert {"starlette", "uvicorn", "sqlalchemy", "uvloop"} <= set(found)
    modules = [*(packages / "bridge/portal").glob("*.py"), *(packages / "sqlalchemy").glob("*.py")]
    assert all(list(path.parent.glob(f"__pycache__/{path.stem}.*.pyc")) for path in modules)
    assert not (packages / "pip").exists()


def test_portal_runs_on_a_read_only_root_without_capabilities(facts):
    assert facts["root_is_read_only"] == "yes"
    assert facts["user"] == "10001"
    assert int(facts["capabilities"], 16) == 0
    assert facts["database"] == "10001:600"
    assert (facts["ready"], facts["challenge"], facts["door"]) == ("200", "200", "200")
    assert facts["person"].endswith("ann is now an approver.")
    assert facts["backup"] == "made"
    assert facts["stop"] == "0"
    assert int(facts["stop_seconds"]) <= 5


def test_health_check_detects_a_hung_or_dead_portal(facts):
    assert facts["unhealthy_before_the_portal_runs"] == "1"
    assert facts["healthy"] == "yes"
    assert facts["unhealthy_while_it_hangs"] == "1"
    assert facts["healthy_again"] == "yes"
    assert facts["unhealthy_once_it_is_gone"] == "1"
    assert facts["not_called_ill_for_a_broken_file"] == "0"
