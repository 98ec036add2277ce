"""The Windows service, tested without Windows: the running agent, the types of pywin32, and the installer's syntax.

No package registry has Windows or PowerShell, so the tests do not run install.ps1. tree-sitter-powershell parses the
script, and the tests compare its commands and names with the existing ones.
"""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import doc_pages
import pytest
from shown_commands import check_ours

from bridge.config import loader
from bridge.testing import EventSpec, Simulator

pytestmark = pytest.mark.deploy

WINDOWS = Path(__file__).parents[2] / "deploy" / "windows"
NAME = "scheduled-events-bridge"

#: Runs the agent as service.py does. A line on standard input stands in for the service manager.
DRIVER = """
import sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from host import Host, redirect_output
redirect_output(Path(sys.argv[2]))
host = Host()
def obey():
    sys.stdin.readline()
    host.stop()
    host.stop()
if sys.argv[3] == "at once":
    host.stop()
threading.Thread(target=obey, daemon=True).start()
code = host.run()
assert host.finished.is_set() and host.exit_code == code
sys.exit(code)
"""


# ---- the agent in the service's process ----


@pytest.fixture
def simulator():
    with Simulator(vms=["vm_0"], rate_limit=False) as running:
        yield running


@pytest.fixture
def service(tmp_path, agent_env):
    """Return a function that starts a program of deploy/windows with a configuration, and the path of its log."""
    log = tmp_path / "data" / NAME / "logs" / "agent.log"
    environment = {
        **agent_env,
        loader.CONFIG_VARIABLE: str(tmp_path / "config.toml"),
        "PROGRAMDATA": str(tmp_path / "data"),
    }
    started = []

    def start(toml, *arguments):
        (tmp_path / "config.toml").write_text(toml, encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, "-B", *arguments], env=environment, cwd=tmp_path, stdin=subprocess.PIPE
        )
        started.append(process)
        return process

    yield start, log
    for process in started:
        process.kill()
        process.communicate()


def settings(endpoint, directory):
    return (
        f'[imds]\nendpoint = "{endpoint}"\n[state]\ndirectory = "{directory}"\n'
        '[status]\nlisten = ""\n[[sinks]]\ntype = "stdout"\n'
    )


def wait_for(text, log, process):
    deadline = time.monotonic() + 30
    while not (log.exists() and text in log.read_text()):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def test_stop_from_another_thread_drains_and_exits_with_0(service, simulator, tmp_path):
    start, log = service
    process = start(settings(simulator.endpoint, tmp_path / "state"), "-c", DRIVER, str(WINDOWS), str(log), "")
    wait_for("The agent is running.", log, process)
    event_id = simulator.world.add_event(EventSpec(event_type="Redeploy"))
    wait_for('"transition":"scheduled"', log, process)
    process.communicate(b"stop\n", timeout=20)
    assert process.returncode == 0
    said = log.read_text()
    assert event_id in said
    assert "The agent stopped." in said


def test_invalid_configuration_exits_with_78_and_logs_the_reason(service):
    start, log = service
    process = start("[imds]\nendpiont = 1\n", "-c", DRIVER, str(WINDOWS), str(log), "")
    assert process.wait(20) == 78
    assert "endpiont" in log.read_text()


def check_types_for_windows(*arguments, **env):
    program = [sys.executable, "-m", "mypy", "--strict", "--platform", "win32", "--cache-dir", os.devnull]
    judged = subprocess.run(
        [*program, *arguments],
        env={**os.environ, **env},
        cwd=WINDOWS,
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert judged.returncode == 0, judged.stdout + judged.stderr


def test_service_uses_pywin32_with_correct_types(package):
    package("mypy")
    stubs = {path.name for entry in sys.path for path in Path(entry).glob("win32-stubs")}
    if not stubs:
        package("win32service")  # skips, or fails if every tool is required
    check_types_for_windows(WINDOWS / "service.py", WINDOWS / "host.py", MYPYPATH=str(WINDOWS))


def test_sinks_type_check_for_windows(package):
    package("mypy")
    if not {path.name for entry in sys.path for path in Path(entry).glob("win32-stubs")}:
        package("win32evtlog")  # likewise
    check_types_for_windows("-m", "sinks.eventlog", "-m", "sinks.file")


# ---- the installer ----

#: The cmdlets in use, with their parameters in Windows PowerShell 5.1 (Microsoft, "PowerShell modules").
CMDLETS = {
    "Copy-Item": {"Path", "Destination"},
    "Get-Acl": {"Path"},
    "Get-ChildItem": {"Path", "Directory"},
    "Get-CimInstance": {"ClassName", "Filter"},
    "Get-Date": {"Format"},
    "Get-Service": {"Name", "ErrorAction"},
    "Invoke-CimMethod": {"InputObject", "MethodName", "Arguments"},
    "Join-Path": set(),
    "New-Item": {"ItemType", "Path", "Force"},
    "New-Service": {"Name", "BinaryPathName", "DisplayName", "Description", "StartupType", "DependsOn"},
    "Out-Null": set(),
    "Remove-Item": {"Path", "Recurse", "Force", "ErrorAction"},
    "Select-Object": {"Skip"},
    "Set-Content": {"Path", "Value", "Encoding"},
    "Set-StrictMode": {"Version"},
    "Sort-Object": {"Property", "Descending"},
    "Start-Service": {"Name"},
    "Stop-Service": set(),
    "Test-Path": set(),
    "Write-Warning": set(),
}
#: The additional cmdlets on the page.
SHOWN_CMDLETS = {
    "Copy-Item": {"Path", "Destination"},
    "Expand-Archive": {"Path", "DestinationPath"},
    "Get-Content": {"Path", "Tail", "Wait"},
    "Get-EventLog": {"LogName", "Source", "Newest"},
    "Get-FileHash": {"Algorithm", "Path"},
    "Get-Service": {"Name"},
    "Invoke-RestMethod": {"Uri"},
    "New-EventLog": {"LogName", "Source"},
    "Remove-EventLog": {"Source"},
    "Restart-Service": {"Name"},
    "Set-ExecutionPolicy": {"Scope", "ExecutionPolicy", "Force"},
    "Set-Location": {"Path"},
    "Unblock-File": {"Path"},
}
AUTOMATIC = {"erroractionpreference", "lastexitcode", "psscriptroot", "true"}


@pytest.fixture(scope="module")
def parse(package):
    """Return a function that parses PowerShell."""
    tree_sitter, grammar = package("tree_sitter"), package("tree_sitter_powershell")
    parser = tree_sitter.Parser(tree_sitter.Language(grammar.language()))
    return lambda text: parser.parse(text).root_node


@pytest.fixture(scope="module")
def script(parse):
    return parse((WINDOWS / "install.ps1").read_bytes())


def nodes(node, *types):
    if node.type in types:
        yield node
    for child in node.children:
        yield from nodes(child, *types)


def text(node):
    return node.text.decode()


def parameters_of(node):
    """Return the names of the parameters of a script or a function, with the dollar sign."""
    return {
        text(child) for found in nodes(node, "script_parameter") for child in found.children if child.type == "variable"
    }


def functions(script):
    return {text(next(nodes(found, "function_name"))): found for found in nodes(script, "function_statement")}


def test_installer_parses_without_errors(script):
    assert not script.has_error, [node.start_point.row + 1 for node in nodes(script, "ERROR")]


def test_installer_uses_only_existing_cmdlets_and_parameters(script):
    own = functions(script)
    assert own
    for command in nodes(script, "command"):
        name = text(command.child_by_field_name("command_name"))
        if command.children[0].type == "command_invokation_operator":
            assert (name, text(command)) == ("$File", "& $File @Arguments"), "only one function starts programs"
            continue
        assert name in own or name in CMDLETS, name
        for parameter in nodes(command, "command_parameter"):
            if parameter.parent.parent == command:
                assert text(parameter).lstrip("-") in CMDLETS.get(name, set()), text(command)


def test_installer_uses_only_assigned_variables(script):
    assigned = {
        text(found) for node in nodes(script, "left_assignment_expression") for found in nodes(node, "variable")
    }
    loops = {text(node.named_children[0]) for node in nodes(script, "foreach_statement")}
    known = {name.lower() for name in parameters_of(script) | assigned | loops} | {f"${name}" for name in AUTOMATIC}
    for found in nodes(script, "variable", "braced_variable"):
        name = text(found).lower().replace("{", "").replace("}", "").replace("@", "$")
        assert name in known or name.startswith("$env:"), name


def test_installer_service_and_agent_use_the_same_names_and_paths(script, tmp_path):
    source, program = text(script), (WINDOWS / "service.py").read_text()
    assert f"$name = '{NAME}'" in source
    assert f'NAME = "{NAME}"' in program
    # the default paths of the agent on Windows
    environment = {"PROGRAMDATA": "DATA"}
    directory = loader.state_directory(loader.read({}), environment, windows=True)
    assert directory == Path("DATA", NAME, "state")
    assert "$data = Join-Path $env:ProgramData $name" in source
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "config.toml").touch()
    found = loader.find_config(None, {"PROGRAMDATA": str(tmp_path)}, windows=True)
    assert found == tmp_path / NAME / "config.toml"
    assert "$file = Join-Path $data 'config.toml'" in source
    for folder in ("state", "logs"):
        assert f"'{folder}'" in text(functions(script)["Protect-Data"])
        assert f"(Join-Path $data '{folder}')" in text(functions(script)["Install-Config"])
    assert 'os.environ["PROGRAMDATA"], NAME, "logs"' in program
    assert 'HERE / "venv" / "Lib" / "site-packages"' in program
    assert "$venv = Join-Path $Version 'venv'" in source


def test_preshutdown_timeout_exceeds_the_stop_grace_period(script):
    (milliseconds,) = re.findall(r"'preshutdown', '(\d+)'", text(functions(script)["Register-Agent"]))
    assert int(milliseconds) / 1000 > loader.read({}).stop_grace_seconds + 1
    assert 'sys.argv[1:2] == ["preshutdown"]' in (WINDOWS / "service.py").read_text()


def test_only_the_service_and_administrators_can_access_the_data(script):
    body = text(functions(script)["Protect-Data"])
    assert "'/inheritance:r'" in body
    granted = set(re.findall(r"[\"'](\*S-[\d-]+|\$\{account\}):\(OI\)\(CI\)(\w+)[\"']", body))
    assert granted == {("*S-1-5-18", "F"), ("*S-1-5-32-544", "F"), ("${account}", "RX"), ("${account}", "M")}
    assert "@('config', $name, 'obj=', $account)" in text(functions(script)["Register-Agent"])


# ---- the page ----

PAGES = ["docs/howto/windows.md", "deploy/windows/README.md"]
SHOWN = [
    pytest.param(block, id=block.mark or page)
    for page in PAGES
    for block in doc_pages.blocks(doc_pages.page(page), "powershell")
]


def parameters_in(command):
    return [text(found).lstrip("-") for found in nodes(command, "command_parameter") if found.parent.parent == command]


@pytest.mark.parametrize("block", SHOWN)
def test_documented_commands_parse_and_use_existing_parameters(parse, script, block):
    root = parse(block.text.encode())
    assert not root.has_error, block.text
    installer = {name.lstrip("$") for name in parameters_of(next(nodes(script, "param_block")))}
    found = list(nodes(root, "command"))
    assert found
    for command in found:
        name = text(command.child_by_field_name("command_name"))
        if "install.ps1" in name:
            assert set(parameters_in(command)) <= installer, text(command)
        elif name.endswith(f'{NAME}.cmd"'):
            assert name == f'"$env:ProgramFiles\\{NAME}\\{NAME}.cmd"'
            check_ours(shlex.split(text(command).partition(name)[2]))
        else:
            assert set(parameters_in(command)) <= SHOWN_CMDLETS[name], text(command)


def test_shipped_configuration_is_valid():
    found = loader.load(WINDOWS / "config.toml")
    assert [sink.type_name for sink in found.sinks] == ["stdout"]
    assert found.state.directory is None
