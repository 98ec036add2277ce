"""The portal's Dockerfile, checked by hadolint, and its lock file. test_portal_container.py runs the image."""

import re
import subprocess
import sys

import pytest
from container_engine import ENGINE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.deploy

CONTAINER = ENGINE.with_name("portal.sh")


@pytest.fixture(scope="module")
def dockerfile(deploy):
    return deploy / "portal/Dockerfile"


# ---- lint -----------------------------------------------------------------------------------------------------------


def test_hadolint_reports_no_findings(tool, dockerfile):
    done = subprocess.run([tool("hadolint"), dockerfile], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert "hadolint" not in dockerfile.read_text()  # and no finding is ignored


# ---- the lock -------------------------------------------------------------------------------------------------------


def locked(path):
    return dict(re.findall(r"(?m)^([a-z0-9-]+)==(\S+)", path.read_text()))


def test_lock_contains_the_extras_and_matches_the_agent_lock(deploy, checkout):
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


# ---- the script of test_portal_container.py -----------------------------------------------------------------------


def test_shellcheck_accepts_the_portal_container_script(tool):
    command = [tool("shellcheck"), "--exclude=SC1091,SC2086", "--shell=sh", CONTAINER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
