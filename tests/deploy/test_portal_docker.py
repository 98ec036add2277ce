"""The portal's image: its Dockerfile read by hadolint and carried out by the kit container_engine, and its lock."""

import email
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from container_engine import ENGINE, Builder, Image, context_of, read_stages, run_in_container

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(600)]

CONTAINER = ENGINE.with_name("portal.sh")
STATE = "/var/lib/scheduled-events-portal"


@pytest.fixture(scope="module")
def dockerfile(deploy):
    return deploy / "portal/Dockerfile"


@pytest.fixture(scope="module")
def image(dockerfile):
    return Image(read_stages(dockerfile.read_text()))


# ---- what it says ---------------------------------------------------------------------------------------------------


def test_hadolint_has_nothing_to_say(tool, dockerfile):
    done = subprocess.run([tool("hadolint"), dockerfile], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert "hadolint" not in dockerfile.read_text()  # nor was it told to ignore anything


def test_base_is_that_of_the_agents_image(dockerfile, deploy):
    said = r"(?m)^ARG BASE=(\S+)$"
    assert re.findall(said, dockerfile.read_text()) == re.findall(said, (deploy / "docker/Dockerfile").read_text())


def test_it_runs_the_portal_as_a_number_that_is_not_root(image):
    assert all(int(part) >= 10_000 for part in image.words["USER"][0].split(":"))
    assert image.command == ["/opt/scheduled-events-portal/venv/bin/scheduled-events-bridge", "portal"]
    assert image.words["STOPSIGNAL"] == ["SIGTERM"]


def test_example_in_its_header_fits_the_image(dockerfile, image):
    header = dockerfile.read_text().partition("ARG ")[0].replace("#", "").replace("\\\n", " ")
    words = shlex.split(re.search(r"docker run .*", header)[0])
    assert {"--read-only", "--init", "ALL", "no-new-privileges", "max-size=10m", "nofile=65536"} <= set(words)
    volumes = [word.split(":") for word in words if ":/" in word]
    assert [volume[1] for volume in volumes] == [*image.words["VOLUME"], "/etc/scheduled-events-portal"]
    assert int(words[words.index("--stop-timeout") + 1]) > 5
    assert words[words.index("--publish") + 1].split(":")[1] in image.words["EXPOSE"][0].split()


# ---- the lock -------------------------------------------------------------------------------------------------------


def locked(path):
    return dict(re.findall(r"(?m)^([a-z0-9-]+)==(\S+)", path.read_text()))


def test_every_line_of_the_lock_has_a_hash_and_none_names_an_index(deploy):
    text = (deploy / "portal/requirements.txt").read_text()
    for line in re.findall(r"(?m)^[a-z0-9][^\n]*==[^\n]*\n[^\n]*", text):
        assert "--hash=sha256:" in line, line
    assert "://" not in text


def test_lock_has_all_of_the_extra_above_its_floors_and_the_versions_that_the_agent_has(deploy, checkout):
    versions, agents = locked(deploy / "portal/requirements.txt"), locked(deploy / "artifact/requirements.txt")
    settings = tomllib.loads((checkout / "pyproject.toml").read_text())
    extras = settings["project"]["optional-dependencies"]
    wanted = [*extras["portal"], *extras["portal-postgresql"]]
    extra = {re.match(r"[\w-]+", each)[0].lower() for each in wanted}
    assert extra <= set(versions)
    assert {name: version for name, version in versions.items() if agents.get(name, version) != version} == {}
    floors = settings["tool"]["scheduled-events-bridge"]["floors"]
    for name in set(floors) & set(versions):
        numbers = tuple(map(int, re.findall(r"\d+", versions[name])))
        assert numbers >= tuple(map(int, re.findall(r"\d+", floors[name]["floor"]))), name


# ---- what comes of it -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(dockerfile, image, checkout, stand_in_engine, tmp_path_factory):
    """Return the builder, and the layer of the image."""
    layers = stand_in_engine(tmp_path_factory.mktemp("portal"))
    builder = Builder(context=context_of(dockerfile, checkout, layers / "context"), directory=layers)
    return builder, builder.build(image.stages)


@pytest.fixture(scope="module")
def facts(built, image, deploy, tmp_path_factory):
    """Return what its container said of itself."""
    directory = tmp_path_factory.mktemp("container")
    shutil.copy(deploy / "portal/kubernetes/base/portal.toml", directory)
    builder, layer = built
    return run_in_container(builder, image, layer, CONTAINER, directory, volume=STATE)


def test_nothing_goes_to_the_builder_that_is_not_needed(built):
    builder, _ = built
    names = {path.name for path in builder.context.iterdir()}
    assert names == {"bridge", "sinks", "deploy", "pyproject.toml", "README.md", "LICENSE"}
    held = {path.name for path in (builder.context / "deploy").rglob("*") if path.is_file()}
    assert held == {"healthcheck.py", "requirements.txt"}


def test_image_holds_the_versions_of_the_lock_compiled_and_no_installer(built, deploy):
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


def test_portal_works_on_a_read_only_root_without_rights(facts):
    assert facts["root_is_read_only"] == "yes"
    assert facts["user"] == "10001"
    assert int(facts["capabilities"], 16) == 0
    assert facts["database"] == "10001:600"
    assert (facts["ready"], facts["challenge"], facts["door"]) == ("200", "200", "200")
    assert facts["person"].endswith("ann is an approver now.")
    assert facts["backup"] == "made"
    assert facts["stop"] == "0"
    assert int(facts["stop_seconds"]) <= 5


def test_health_check_tells_a_healthy_portal_from_a_hung_and_a_dead_one(facts):
    assert facts["unhealthy_before_the_portal_runs"] == "1"
    assert facts["healthy"] == "yes"
    assert facts["unhealthy_while_it_hangs"] == "1"
    assert facts["healthy_again"] == "yes"
    assert facts["unhealthy_once_it_is_gone"] == "1"
    assert facts["not_called_ill_for_a_broken_file"] == "0"


def test_stand_in_for_a_day_of_the_portal_is_clean(tool):
    command = [tool("shellcheck"), "--exclude=SC1091,SC2086", "--shell=sh", CONTAINER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
