"""The Dockerfile, checked by hadolint and executed instruction by instruction without a container engine.

The test machines have no container engine and cannot pull images, so the kit container_engine stands in for one.
Not covered: the base image, and differences between an engine and the kit.
"""

import email
import re
import subprocess

import pytest
from container_engine import ENGINE, Builder, Image, context_of, read_stages, run_in_container

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(600)]

CONTAINER = ENGINE.with_name("container.sh")
STATE = "/var/lib/scheduled-events-bridge"


@pytest.fixture(scope="module")
def dockerfile(deploy):
    return deploy / "docker/Dockerfile"


@pytest.fixture(scope="module")
def image(dockerfile):
    return Image(read_stages(dockerfile.read_text()))


# ---- lint -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["docker/Dockerfile", "portal/Dockerfile"])
def test_hadolint_reports_no_findings(tool, deploy, path):
    done = subprocess.run([tool("hadolint"), deploy / path], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert "hadolint" not in (deploy / path).read_text()  # and no finding is ignored


def test_shellcheck_accepts_the_container_scripts_and_the_stand_in_of_the_engine(tool):
    for command in (["--exclude=SC1091,SC2086", "--shell=sh", CONTAINER, ENGINE.with_name("portal.sh")], [ENGINE]):
        done = subprocess.run([tool("shellcheck"), *command], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout


# ---- the image ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def layers(stand_in_engine, tmp_path_factory):
    """Return a directory for the layers of an image."""
    return stand_in_engine(tmp_path_factory.mktemp("docker"))


@pytest.fixture(scope="module")
def built(dockerfile, image, checkout, layers):
    """Return the builder, the layer of the image, and the build context."""
    context = context_of(dockerfile, checkout, layers / "context")
    builder = Builder(context=context, directory=layers)
    return builder, builder.build(image.stages), context


@pytest.fixture(scope="module")
def facts(built, image, tmp_path_factory):
    """Return the results of the container script."""
    builder, layer, _ = built
    return run_in_container(builder, image, layer, CONTAINER, tmp_path_factory.mktemp("container"), volume=STATE)


def test_build_context_contains_only_required_files(built):
    _, _, context = built
    assert {path.name for path in context.iterdir()} == {
        "bridge",
        "sinks",
        "deploy",
        "pyproject.toml",
        "README.md",
        "LICENSE",
    }
    held = {path.name for path in (context / "deploy").rglob("*") if path.is_file()}
    assert held == {"healthcheck.py", "drain.py", "requirements.txt"}


def test_image_contains_the_locked_versions(built, deploy):
    _, layer, _ = built
    lock = (deploy / "artifact/requirements.txt").read_text()
    locked = set(re.findall(r"(?m)^([a-z0-9-]+==[^ ]+)", lock))
    found = (layer / "root/opt/scheduled-events-bridge/venv/lib").glob("python*/site-packages/*.dist-info/METADATA")
    pins = set()
    for metadata in found:
        said = email.message_from_string(metadata.read_text())
        pins.add(f"{re.sub('[-_.]+', '-', said['Name']).lower()}=={said['Version']}")
    pins -= {pin for pin in pins if pin.startswith("scheduled-events-bridge==")}
    assert len(pins) > 15
    assert pins - locked == set()
    assert not [pin for pin in pins if pin.startswith(("apprise==", "aiohttp=="))]  # of extras that were not requested


def test_agent_runs_on_a_read_only_root_without_capabilities(facts):
    assert facts["root_is_read_only"] == "yes"
    assert facts["user"] == "10001"
    assert int(facts["capabilities"], 16) == 0
    assert facts["record_on_standard_output"] == "yes"
    assert facts["state"] == "10001:600"
    assert facts["stop"] == "0"


def test_health_check_detects_a_hung_or_dead_agent(facts):
    assert facts["unhealthy_before_the_agent_runs"] == "1"
    assert facts["healthy"] == "yes"
    assert facts["unhealthy_while_it_hangs"] == "1"
    assert facts["healthy_again"] == "yes"
    assert facts["unhealthy_once_it_is_gone"] == "1"


def test_health_check_uses_the_configured_address(facts):
    assert facts["healthy_where_the_configuration_says"] == "yes"
    assert facts["healthy_where_the_environment_says"] == "yes"
    assert facts["not_called_ill_for_a_broken_file"] == "0"
    assert facts["not_called_ill_without_a_listener"] == "0"
