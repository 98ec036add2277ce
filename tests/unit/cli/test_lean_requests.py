"""Commands import requests only if a sink or the portal uses it, and then without its character set detection."""

import subprocess
import sys

from bridge.outbox.outbox import Outbox

DETECTION = "{'chardet', 'charset_normalizer'} & set(sys.modules)"


def run(code):
    return subprocess.run([sys.executable, "-W", "error", "-c", code], check=False, capture_output=True, text=True)


APPROVALS = """
[approval.remote]
url = "https://portal.invalid"
entra_scope = "api://portal/.default"
[[approval.remote.keys]]
kid = "ops"
approver = "ops"
public_key_file = "/nowhere/ops.pub"
[[sinks]]
type = "webhook"
url = "https://hooks.invalid/x"
"""


def test_status_imports_neither_requests_nor_prometheus_client(tmp_path):
    config, state = tmp_path / "config.toml", tmp_path / "state"
    config.write_text(f'[state]\ndirectory = "{state}"\n{APPROVALS}')
    outbox = Outbox(state, claim=lambda: False)
    assert outbox.wait_loaded(30)
    outbox.configure(lambda *_: ("webhook",), ["webhook"], labels={})
    outbox.close(30)
    done = run(
        "import sys; from bridge.cli.commands import commands\n"
        f"commands.main(['status', '--config', {str(config)!r}], standalone_mode=False)\n"
        "print({'requests', 'prometheus_client', 'urllib3', 'ssl'} & set(sys.modules))"
    )
    assert "webhook" in done.stdout
    assert (done.stdout.splitlines()[-1], done.stderr) == ("set()", "")


def send_test(config):
    return (
        "import click, sys; from bridge.cli.commands import commands\n"
        f"try: commands.main(['send-test', '--config', {str(config)!r}, 'no-such-sink'], standalone_mode=False)\n"
        "except click.UsageError: pass\n"
    )


def test_requests_is_imported_without_charset_detection_or_warning(tmp_path):
    config = tmp_path / "config.toml"
    config.write_text(
        '[[sinks]]\ntype = "eventhubs"\nfully_qualified_namespace = "x.servicebus.windows.net"\neventhub = "y"\n'
    )
    done = run(
        f"{send_test(config)}print('requests' in sys.modules, {DETECTION})\n"
        "import requests; print(requests.Response().apparent_encoding)\n"
        "import charset_normalizer; print(charset_normalizer.from_bytes(b'a').best().encoding)"
    )
    assert (done.stdout, done.stderr) == ("True set()\nutf-8\nascii\n", "")


def test_webhook_does_not_import_requests(tmp_path):
    config = tmp_path / "config.toml"
    config.write_text('[[sinks]]\ntype = "webhook"\nurl = "https://hooks.invalid/x"\n')
    done = run(f"{send_test(config)}print({{'requests', 'urllib3'}} & set(sys.modules))")
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_library_leaves_requests_as_installed():
    done = run(f"import sys; from bridge.sink import DeadlineSession; import requests; print(bool({DETECTION}))")
    assert (done.stdout, done.stderr) == ("True\n", "")
