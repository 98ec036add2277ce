"""What every test gets: an environment for agents, one way to run Hypothesis, and a guard against leaked threads.

An agent under test must not inherit what hides its faults. PYTHONUNBUFFERED hides output that is lost in a buffer;
PYTHONDONTWRITEBYTECODE raises memory; a forced colour or a config file of whoever runs the tests changes what the
agent prints and does.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

_NOT_FOR_AGENTS = (
    "PYTHONUNBUFFERED",
    "PYTHONDONTWRITEBYTECODE",
    "FORCE_COLOR",
    "CLICOLOR_FORCE",
    "SCHEDULED_EVENTS_BRIDGE_CONFIG",
    "STATE_DIRECTORY",
)
_LAST_THREADS_SECONDS = 2.0
_WORKERS = 8
_HERE = Path(__file__).parent
_OTHER_TIERS = ("deploy", "interop", "packaging")

# No deadline and no too_slow: a busy machine is no fault of the code. Random on a desk, where a new counter-example
# is welcome and its blob is printed; the same every time in CI, where red must mean that this commit broke it.
_PROFILE = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("desk", _PROFILE)
settings.register_profile("ci", _PROFILE, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "desk")


def pytest_configure(config: pytest.Config) -> None:
    """Give signals back their meaning: whoever starts the tests in the background hands them on ignored.

    And let what tests write be written by its owner alone: with a umask of 002 their agents would rightly not approve.
    """
    _begin_elsewhere(config)
    os.umask(os.umask(0o022) | 0o022)
    # What an agent leaves until the next boot is left where it goes with the run.
    runtime = tempfile.mkdtemp(prefix="runtime-")
    os.environ["RUNTIME_DIRECTORY"] = runtime
    atexit.register(shutil.rmtree, runtime, ignore_errors=True)
    for name, handler in (
        ("SIGINT", signal.default_int_handler),
        ("SIGTERM", signal.SIG_DFL),
        ("SIGHUP", signal.SIG_DFL),
    ):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run the normal suite side by side, as `-n 8 --dist worksteal` does; `-n` on the command line takes its place.

    Most tests wait for a deadline or a process, so eight share two cores well. Not for single files, whose workers
    would take longer to start than they run, nor for the other tiers, which measure or share what they start.
    """
    is_chosen = config.option.markexpr not in config.getini("addopts") or any(
        ".py" in argument for argument in config.args
    )
    is_told = getattr(config.option, "numprocesses", 0) is not None or config.option.usepdb
    if is_chosen or is_told or "PYTEST_XDIST_WORKER" in os.environ:  # a worker is not to have workers
        return
    config.option.numprocesses = _WORKERS
    config.option.dist = "worksteal"
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each worker would compile every test for itself


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the folders in which the default run deselects every test. Their import takes seconds in each worker."""
    is_default = config.option.markexpr in config.getini("addopts")
    return True if is_default and collection_path.parent == _HERE and collection_path.name in _OTHER_TIERS else None


def _begin_elsewhere(config: pytest.Config) -> None:
    """Let each worker import another part of the tests first, and find the others' compiled by their workers."""
    folders = [Path(argument).resolve() for argument in config.args]
    if not hasattr(config, "workerinput") or not all(each.is_dir() and each.is_relative_to(_HERE) for each in folders):
        return
    files = [str(path) for folder in folders for path in sorted(folder.rglob("test_*.py"))]
    first = len(files) * int(config.workerinput["workerid"].removeprefix("gw")) // config.workerinput["workercount"]
    config.args[:] = files[first:] + files[:first]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give all workers the tests in the same order, wherever they began."""
    items.sort(key=lambda item: item.path)  # those of a file stay in theirs


@pytest.fixture
def agent_env() -> dict[str, str]:
    """Return the environment to start an agent with: this one, without what would hide its faults."""
    return {name: value for name, value in os.environ.items() if name not in _NOT_FOR_AGENTS}


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    """Fail a test that leaves a non-daemon thread behind: such a thread keeps an agent from ever exiting."""
    before = set(threading.enumerate())
    yield
    leaked = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    deadline = time.monotonic() + _LAST_THREADS_SECONDS
    for thread in leaked:
        thread.join(max(0.0, deadline - time.monotonic()))
    alive = [thread.name for thread in leaked if thread.is_alive()]
    if alive:
        pytest.fail(f"The test left {len(alive)} thread(s) running: {', '.join(alive)}. Stop and join them.")
