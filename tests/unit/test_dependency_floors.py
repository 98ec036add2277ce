"""Declared and installed dependencies are at or above the floors without known vulnerabilities in pyproject.toml.

The test calls no service, so that the result is reproducible and independent of proxies.
"""

import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYPROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
FLOORS = PYPROJECT["tool"]["scheduled-events-bridge"]["floors"]
USERS_EXTRAS = ("apprise", "portal", "portal-postgresql", "template", "websocket")
ADVISORY = re.compile(r"none|CVE-\d{4}-\d{4,}.*: .+")


def _requirements(lines):
    """Return (name, declared minimum or None) of each of *lines*."""
    for requirement in map(Requirement, lines):
        least = [each.version for each in requirement.specifier if each.operator == ">="]
        yield canonicalize_name(requirement.name), least[0] if least else None


PROJECT = PYPROJECT["project"]
USERS = [
    *PROJECT["dependencies"],
    *(line for extra in USERS_EXTRAS for line in PROJECT["optional-dependencies"][extra]),
]
DEVELOPERS = PROJECT["optional-dependencies"]["dev"]


def test_table_lists_exactly_the_dependencies_of_users():
    assert {name for name, _ in _requirements(USERS)} == set(FLOORS)
    assert set(PROJECT["optional-dependencies"]) == {*USERS_EXTRAS, "dev"}


def test_every_floor_has_a_reason():
    assert [name for name, entry in FLOORS.items() if not ADVISORY.fullmatch(entry["why"])] == []


@pytest.mark.parametrize(("name", "least"), sorted({*_requirements(USERS), *_requirements(DEVELOPERS)}, key=str))
def test_no_declared_minimum_is_below_the_floor(name, least):
    if name in FLOORS:
        assert least is not None, f"{name} has no minimum"
        assert Version(least) >= Version(FLOORS[name]["floor"])


@pytest.mark.parametrize("name", FLOORS)
def test_no_installed_version_is_below_the_floor(name):
    try:
        installed = version(name)
    except PackageNotFoundError:
        pytest.skip(f"{name} is not installed: of an extra, or for another Python")
    assert Version(installed) >= Version(FLOORS[name]["floor"])
