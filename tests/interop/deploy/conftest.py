"""Where the tools are that judge deploy/: skipped without one, but not where they are required."""

import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def deploy():
    """Return the directory deploy/."""
    return ROOT / "deploy"


@pytest.fixture(scope="session")
def tool():
    """Return a function that finds a program by name; `.ci/run deploy` sets DEPLOY_TOOLS=required."""

    def find(name):
        found = os.environ.get("OTELCOL") if name == "otelcol" else None
        found = found or shutil.which(name)
        if found is None:
            absent(f"{name} is not on this machine")
        return found

    return find


@pytest.fixture(scope="session")
def package():
    """Return a function that imports a Python package by name, or skips."""

    def load(name):
        try:
            return __import__(name)
        except ImportError:
            return absent(f"the Python package {name} is not installed")

    return load


def absent(sentence):
    """Skip, or fail where every tool must be there."""
    if os.environ.get("DEPLOY_TOOLS") == "required":
        pytest.fail(sentence)
    pytest.skip(sentence)
