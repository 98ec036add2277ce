"""The restart with the C library's allocator: once, in the same process, and only where a command was asked for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.system import allocator

pytestmark = pytest.mark.skipif(not allocator.is_glibc(), reason="only glibc's gives back what lies between")

_BEGIN = """
import json, os, sys
{change}
print(os.getpid(), flush=True)
from bridge.system.allocator import restart_with_that_of_the_c_library as restart
restart()
said = {{"pid": os.getpid(), "arguments": sys.argv[1:], "allocator": os.environ.get("PYTHONMALLOC")}}
print(json.dumps(said))
"""


@pytest.fixture
def env(agent_env):
    return {name: value for name, value in agent_env.items() if name != "PYTHONMALLOC"}


def _begin(env, *, change="", options=(), **variables):
    command = [sys.executable, *options, "-c", _BEGIN.format(change=change), "portal", "--log-level", "a b"]
    with subprocess.Popen(command, env={**env, **variables}, stdout=subprocess.PIPE, text=True) as process:
        *begun, said = process.communicate(timeout=60)[0].splitlines()
    assert process.returncode == 0
    assert {int(pid) for pid in begun} == {process.pid}
    said = json.loads(said)
    assert said["pid"] == process.pid
    return len(begun), said["arguments"], said["allocator"]


def test_process_begins_once_more_with_its_number_and_its_arguments(env):
    assert _begin(env) == (2, ["portal", "--log-level", "a b"], "malloc")


def test_what_the_environment_says_counts(env):
    assert _begin(env, PYTHONMALLOC="pymalloc") == (1, ["portal", "--log-level", "a b"], "pymalloc")


def test_python_that_does_not_read_its_environment_is_left_alone(env):
    change = f"sys.path.insert(0, {str(Path(allocator.__file__).parents[2])!r})"
    assert _begin(env, change=change, options=["-E"]) == (1, ["portal", "--log-level", "a b"], None)


def test_program_that_calls_with_arguments_of_its_own_is_not_begun_again(env):
    assert _begin(env, change="sys.argv[1:] = ['portal']") == (1, ["portal"], None)


def test_it_goes_on_where_it_cannot_begin_again(env):
    found = _begin(env, change="sys.executable = '/nowhere/python'")
    assert found == (1, ["portal", "--log-level", "a b"], None)
