"""The installed wheel with only its runtime dependencies."""

import json
import subprocess

import pytest

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(600)]

# Some of these modules use 7 to 14 MB each. An agent with only a webhook must not load the modules of Event Hubs.
_ONLY_WHEN_USED = ("azure", "opentelemetry", "cryptography", "rich", "jinja2", "aiohttp", "apprise", "pytest")

_PRINT_EARLY_IMPORTS = f"""
import json, sys
early = [name for name in {_ONLY_WHEN_USED!r} if name in sys.modules]
print(json.dumps(early))
"""

_BUILD_STDOUT_SINK = """
from importlib.metadata import entry_points
(point,) = entry_points(group="scheduled_events_bridge.sinks", name="stdout")
sink_class = point.load()
sink_class(sink_class.Config()).close()
"""

_PRINT_SINKS = """
import json
from importlib.metadata import entry_points
from bridge.sink import Sink, SinkConfig
for point in entry_points(group="scheduled_events_bridge.sinks"):
    loaded = point.load()
    print(json.dumps([point.name, issubclass(loaded, Sink) and issubclass(loaded.Config, SinkConfig)]))
"""

_PRINT_PLACES = """
import bridge, json, pathlib, sinks, sysconfig
site = pathlib.Path(sysconfig.get_path("purelib")).resolve()
places = [pathlib.Path(module.__file__).resolve().parent for module in (bridge, sinks)]
print(json.dumps([[p.parent == site, (p / "py.typed").is_file()] for p in places]))
"""


def _run(argv, *, cwd, env):
    return subprocess.run(
        argv, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
    )


def test_packages_come_from_site_packages_and_are_typed(installed, tmp_path):
    assert json.loads(installed.evaluate(_PRINT_PLACES, cwd=tmp_path)) == [[True, True], [True, True]]


def test_version_option_prints_the_version_of_the_wheel(installed, wheel, agent_env, tmp_path):
    done = _run([installed.command, "--version"], cwd=tmp_path, env=agent_env)
    assert done.returncode == 0, done.stderr
    assert wheel.name.split("-")[1] in done.stdout.split()


def test_every_sink_entry_point_loads_a_sink(installed, tmp_path):
    lines = installed.evaluate(_PRINT_SINKS, cwd=tmp_path).splitlines()
    found = dict(json.loads(line) for line in lines)
    assert "stdout" in found
    assert all(found.values()), found


def test_cli_imports_no_sdk(installed, tmp_path):
    assert json.loads(installed.evaluate("import bridge.cli.commands" + _PRINT_EARLY_IMPORTS, cwd=tmp_path)) == []


def test_stdout_sink_imports_no_sdk(installed, tmp_path):
    code = "import bridge.cli.commands" + _BUILD_STDOUT_SINK + _PRINT_EARLY_IMPORTS
    assert json.loads(installed.evaluate(code, cwd=tmp_path)) == []
