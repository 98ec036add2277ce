"""The lock file of the portal's image. test_portal_container.py runs the image."""

import re
import sys

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.deploy


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
