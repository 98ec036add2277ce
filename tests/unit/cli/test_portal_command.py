"""The command `portal` where the portal is not installed, and what it costs an agent: nothing."""

from __future__ import annotations

import json
import subprocess
import sys

from bridge.cli.commands import commands

_LIBRARIES = ("sqlalchemy", "starlette", "uvicorn", "uvloop", "httptools", "alembic")
_LOADED = (
    "import json, sys; import bridge.cli.commands as c; from click.testing import CliRunner; "
    "assert CliRunner().invoke(c.commands, ['--help']).exit_code == 0; "
    "print(json.dumps([m for m in sys.modules if m.startswith('bridge.portal') or m == 'bridge.cli.portal' "
    f"or m.partition('.')[0] in {_LIBRARIES}]))"
)
_WITHOUT = (
    "import sys; from importlib.abc import MetaPathFinder\n"
    "class Missing(MetaPathFinder):\n"
    "    def find_spec(self, name, path, target=None):\n"
    f"        if name.partition('.')[0] in {_LIBRARIES}:\n"
    "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
    "sys.meta_path.insert(0, Missing())\n"
    "sys.argv = ['scheduled-events-bridge', 'portal', 'migrate', '--config', '/none']\n"
    "from bridge.cli import main; main()"
)


def _python(code, env):
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )


def test_neither_the_agent_nor_help_loads_anything_of_the_portal(agent_env):
    done = _python(_LOADED, agent_env)
    assert json.loads(done.stdout) == [], done.stderr


def test_without_its_libraries_one_sentence_says_how_to_get_them(agent_env):
    done = _python(_WITHOUT, agent_env)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    if sys.version_info < (3, 11):
        assert line.startswith("The portal needs Python 3.11 or newer, and this is 3.10.")
    else:
        assert line.startswith("The portal is not installed here: there is no module ")
        assert "[portal]" in line


def test_it_has_its_commands():
    assert set(commands.commands["portal"].commands) == {"migrate", "backup", "audit", "export", "users"}
