"""Declared and installed dependencies are at or above the floors without known vulnerabilities in pyproject.toml.

The test calls no service, so that the result is reproducible and independent of proxies.
"""

import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYPROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
FLOORS = PYPROJECT["tool"]["scheduled-events-bridge"]["floors"]
USERS_EXTRAS = ("apprise", "portal", "portal-postgresql", "template", "websocket")
REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*([^;]*)")
ADVISORY = re.compile(r"none|CVE-\d{4}-\d{4,}.*: .+")


def _requirements(lines):
    """Return (name, declared minimum or None) of each of *lines*; names as PEP 503 compares them."""
    for line in lines:
        name, limits = REQUIREMENT.match(line).groups()
        least = re.search(r">=\s*([0-9.]+)", limits)
        yield re.sub(r"[-_.]+", "-", name).lower(), least and least[1]


def _numbers(text):
    return tuple(map(int, re.match(r"\d+(?:\.\d+)*", text)[0].split(".")))


def _is_least(least, floor):
    length = max(len(_numbers(least)), len(_numbers(floor)))
    return _padded(least, length) >= _padded(floor, length)


def _padded(text, length):
    return _numbers(text) + (0,) * (length - len(_numbers(text)))


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
        assert _is_least(least, FLOORS[name]["floor"])


@pytest.mark.parametrize("name", FLOORS)
def test_no_installed_version_is_below_the_floor(name):
    try:
        installed = version(name)
    except PackageNotFoundError:
        pytest.skip(f"{name} is not installed: of an extra, or for another Python")
    assert _is_least(installed, FLOORS[name]["floor"])


@pytest.mark.parametrize(
    ("least", "floor", "is_least"),
    [
        ("2.8.0", "2.8.0", True),
        ("2.7.9", "2.8.0", False),
        ("2.10", "2.8.0", True),
        ("3", "3.0.0", True),
        ("3.1", "3.1.6", False),
    ],
)
def test_versions_are_compared_as_numbers(least, floor, is_least):
    assert _is_least(least, floor) == is_least
