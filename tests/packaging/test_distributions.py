"""The contents of the wheel and of the sdist."""

import email
import tarfile
import zipfile

import pytest

pytestmark = pytest.mark.packaging


@pytest.fixture(scope="module")
def wheel_names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def sdist_names(wheel):
    """Return the files of the sdist next to the wheel, without their top-level directory."""
    (sdist,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        return {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}


@pytest.fixture(scope="module")
def metadata(wheel, wheel_names):
    (name,) = (name for name in wheel_names if name.endswith(".dist-info/METADATA"))
    with zipfile.ZipFile(wheel) as archive:
        return email.message_from_bytes(archive.read(name))


def test_wheel_contains_only_the_two_packages(wheel_names):
    top_level = {name.partition("/")[0] for name in wheel_names}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"bridge", "sinks"}


@pytest.mark.parametrize(
    "name",
    [
        "bridge/py.typed",
        "sinks/py.typed",
        "bridge/approval/PROTOCOL.md",
        "bridge/cli/commands.py",
        "bridge/testing/contract.py",
        "sinks/webhook/sink.py",
    ],
)
def test_wheel_contains_file(name, wheel_names):
    assert name in wheel_names


def test_wheel_contains_the_scenarios(wheel_names):
    names = [name for name in wheel_names if name.startswith("bridge/testing/simulator/scenarios/")]
    assert "bridge/testing/simulator/scenarios/live-migration.toml" in names
    assert all(name.endswith(".toml") for name in names)


def test_wheel_contains_all_package_files_of_the_sdist(wheel_names, sdist_names):
    assert {name for name in sdist_names if name.startswith(("bridge/", "sinks/"))} <= wheel_names


@pytest.mark.parametrize("name", ["LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "tests/conftest.py"])
def test_sdist_contains_file(name, sdist_names):
    assert name in sdist_names


def test_sdist_contains_no_build_or_test_artifacts(sdist_names):
    left = ("__pycache__", ".venv/", ".hypothesis/", ".pytest_cache/", "dist/")
    assert not [name for name in sdist_names if any(part in name for part in left)]


def test_wheel_and_metadata_contain_the_license(metadata, wheel_names):
    assert metadata["License-Expression"] == "MIT"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert [name for name in wheel_names if name.endswith(".dist-info/licenses/LICENSE")]


def test_metadata_has_the_name_and_the_supported_python_versions(metadata):
    assert metadata["Name"] == "scheduled-events-bridge"
    assert metadata["Requires-Python"] == ">=3.10"
    classifiers = metadata.get_all("Classifier") or []
    for version in ("3.10", "3.11", "3.12", "3.13", "3.14"):
        assert f"Programming Language :: Python :: {version}" in classifiers


def test_file_name_has_the_version_of_the_metadata(wheel, metadata):
    assert wheel.name == f"scheduled_events_bridge-{metadata['Version']}-py3-none-any.whl"
