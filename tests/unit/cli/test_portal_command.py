"""The command `portal` without the libraries of the portal, which the agent never imports."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

_LIBRARIES = ("sqlalchemy", "starlette", "uvicorn", "uvloop", "httptools", "alembic")
_LOADED = (
    "import json, sys; import bridge.cli.commands as c; from click.testing import CliRunner; "
    "assert CliRunner().invoke(c.commands, ['--help']).exit_code == 0; "
    "print(json.dumps([m for m in sys.modules if m.startswith('bridge.portal') "
    f"or m.partition('.')[0] in {_LIBRARIES}]))"
)
_WITHOUT = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in LIBRARIES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


def _python(code, env):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def _python_without(libraries, code, env):
    return _python(f"LIBRARIES = {libraries}{_WITHOUT}{code}", env)


def test_help_imports_no_module_of_the_portal(agent_env):
    done = _python(_LOADED, agent_env)
    assert json.loads(done.stdout) == [], done.stderr


def test_missing_library_is_reported_with_the_extra_to_install(agent_env):
    migrate = "sys.argv = ['a', 'portal', 'migrate', '--config', '/none']; from bridge.cli import main; main()"
    done = _python_without(_LIBRARIES, migrate, agent_env)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    if sys.version_info < (3, 11):
        assert line.startswith("The portal needs Python 3.11 or newer, but this is Python 3.10.")
    else:
        assert line.startswith("The portal is not installed: the module ")
        assert "[portal]" in line


_TRY_TREE = Path(__file__).parents[3] / "deploy/systemd/try_tree.py"


@pytest.mark.skipif(not _TRY_TREE.exists(), reason="the tests run without the files of deploy/")
def test_modules_that_the_installer_imports_need_no_library_of_the_portal(agent_env):
    code = f"""
import importlib, json, pkgutil, runpy
others = runpy.run_path({str(_TRY_TREE)!r})["NOT_FOR_A_SERVICE"]
import bridge
wrong = []
for found in pkgutil.walk_packages(bridge.__path__, "bridge.", onerror=lambda name: None):
    if not f"{{found.name}}.".startswith(tuple(f"{{other}}." for other in others)):
        try:
            importlib.import_module(found.name)
        except Exception as error:
            wrong.append(f"{{found.name}}: {{error}}")
print(json.dumps(wrong))
"""
    done = _python_without((*_LIBRARIES, "argon2", "jinja2", "asn1crypto"), code, agent_env)
    assert json.loads(done.stdout) == [], done.stderr
