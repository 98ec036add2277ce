"""Checks that a test runs, loads, or compares every fenced block of the documentation.

The type of a block determines its test:

- TOML: a configuration. This module runs `check-config` on it.
- Shell commands after `<!-- needs: ... -->`: commands that no test can run. The kit `shown_commands` lists their marks,
  and test_shown_commands.py checks that the commands and options exist.
- All other blocks: a block with a mark. RUN names the test that runs, loads, or compares the block.
"""

import re
import stat
import sys
from importlib.util import find_spec
from pathlib import Path

import doc_pages
import pytest
from click.testing import CliRunner
from shown_commands import NEEDED

from bridge.approval.signing import generate_key
from bridge.cli.commands import commands

ROOT = doc_pages.ROOT
_TRY = "tests/docs/test_try.py::test_first_webhook_page_produces_the_documented_output"
_APPROVAL = "tests/docs/test_first_approval.py::test_commands_of_the_first_approval_page_approve_and_start_an_event"
_FIRST_VM = "tests/docs/test_first_vm.py::test_first_vm_page_matches_an_approved_reboot"
_GENERATED = "tests/docs/test_reference.py::test_generated_parts_are_up_to_date"
_SINK = "tests/docs/test_sink_readme.py::test_example_sink_sends_by_class_or_entry_point_name"
_SECRETS_UNITS = "tests/deploy/test_operate_pages.py::test_systemd_analyze_accepts_the_units_of_the_secrets_page"
_FIRST_PORTAL = "tests/portal/test_first_portal.py::test_documented_first_portal_approves_an_event_that_then_starts"
_PORTAL_PAGE = "tests/deploy/test_portal_page.py::test_documented_commands_run_back_up_restore_upgrade_and_roll_back"
#: Mark of a block -> the test that runs, loads, or compares it.
RUN = {
    "demo-command": "tests/docs/test_readme.py::test_readme_demo_command_works_in_a_fresh_copy",
    "test-command": ".ci/run::step_readme",
    "try: enter": _TRY,
    "try: run": _TRY,
    "try: seen": _TRY,
    "try: look": _TRY,
    "file: receiver.py": _TRY,
    "approval: enter": _APPROVAL,
    "approval: run": _APPROVAL,
    "approval: announce": _APPROVAL,
    "approval: approve": _APPROVAL,
    "first VM: look": _FIRST_VM,
    "first VM: watch": _FIRST_VM,
    "first VM: approve": _FIRST_VM,
    "first VM: after": _FIRST_VM,
    "first VM: seen": _FIRST_VM,
    "approvals: stop": "tests/docs/test_first_vm.py::test_status_reports_the_file_that_disables_approvals",
    "file: portal.toml": "tests/portal/test_settings.py::test_documented_configurations_are_valid",
    "first portal: install": ".ci/run::step_portal",
    "first portal: enter": _FIRST_PORTAL,
    "first portal: secrets": _FIRST_PORTAL,
    "inventory: configuration": "tests/portal/test_settings.py::test_documented_configurations_are_valid",
    "file: vms.csv": "tests/portal/test_inventory.py::test_documented_inventory_file_is_valid",
    "file: first portal.toml": _FIRST_PORTAL,
    "file: first agent.toml": _FIRST_PORTAL,
    "first portal: run": _FIRST_PORTAL,
    "first portal: announce": _FIRST_PORTAL,
    "first portal: user": _FIRST_PORTAL,
    "portal: people": "tests/portal/test_users_command.py::test_documented_commands_create_the_users",
    "portal: people configuration": "tests/portal/test_users_command.py::test_documented_commands_create_the_users",
    "notify: configuration": "tests/portal/test_notify_settings.py::test_documented_configuration_is_valid",
    "login: configuration": "tests/portal/test_oidc.py::test_documented_configuration_is_valid",
    "postgresql: database": "tests/portal/test_postgresql.py::test_documented_roles_can_serve_but_not_change_the_audit",
    "postgresql: a role that may only add": (
        "tests/portal/test_postgresql.py::test_documented_roles_can_serve_but_not_change_the_audit"
    ),
    "postgresql: configuration": "tests/portal/test_settings.py::test_documented_configurations_are_valid",
    "portal: decide": "tests/portal/test_agent_follows.py::test_documented_commands_sign_and_send_a_decision",
    "portal service: install": "tests/deploy/test_portal_boot.py::test_every_command_block_of_the_page_succeeds",
    "portal service: set up": _PORTAL_PAGE,
    "portal service: secrets": _PORTAL_PAGE,
    "portal service: start": _PORTAL_PAGE,
    "portal service: people": _PORTAL_PAGE,
    "portal service: backup": _PORTAL_PAGE,
    "portal service: try the backup": _PORTAL_PAGE,
    "portal service: restore": _PORTAL_PAGE,
    "portal service: upgrade": _PORTAL_PAGE,
    "portal service: back": _PORTAL_PAGE,
    "portal service: rotate": _PORTAL_PAGE,
    "portal service: TLS": _PORTAL_PAGE,
    "portal service: audit": _PORTAL_PAGE,
    "keys: make and use": "tests/docs/test_shown_commands.py::test_documented_commands_sign_a_decision",
    "example: check": "tests/docs/test_protocol.py::test_documented_openssl_commands_verify_the_example",
    "kql: transformation": ("tests/docs/test_operators.py::test_documented_command_prints_the_transformation_as_json"),
    "kql: look": "tests/deploy/test_kql.py::test_documented_workspace_query_is_valid",
    **dict.fromkeys(
        [f"windows: {what}" for what in ("unpack", "install", "configure", "look", "event log", "remove")],
        "tests/deploy/test_windows.py::test_documented_commands_parse_and_use_existing_parameters",
    ),
    "drain script": "tests/docs/test_configurations.py::test_drain_script_drains_and_undrains",
    "file: acme_pager.py": _SINK,
    "file: pyproject.toml": _SINK,
    "file: by-class.toml": _SINK,
    "file: by-name.toml": _SINK,
    "file: test_acme_pager.py": "tests/docs/test_sink_readme.py::test_example_passes_the_contract_suite",
    "generated: record": _GENERATED,
    "generated: record short": _GENERATED,
    "alertmanager: route": "tests/interop/test_alertmanager.py::test_documented_route_sends_info_to_another_receiver",
    "nginx": "tests/e2e/test_load_balancers.py::test_nginx_returns_503_during_an_event_and_200_during_an_agent_upgrade",
    "haproxy": "tests/e2e/test_load_balancers.py::"
    "test_haproxy_sends_no_new_request_to_the_vm_after_two_check_intervals",
    "rollout: duration": (
        "tests/deploy/test_management_group.py::test_documented_durations_match_the_formula_and_the_template"
    ),
    "file: rings.json": "tests/deploy/test_fleet.py::test_documented_rings_assign_each_vm",
    "ansible: rollout": "tests/deploy/test_ansible.py::test_rollout_stops_at_the_failed_ring_and_rolls_back",
    "ansible: remove": "tests/deploy/test_ansible.py::test_removal_handles_machines_with_and_without_the_agent",
    "file: fetch-secrets": "tests/docs/test_secrets.py::test_documented_program_writes_vault_secrets_for_the_agent",
    "unit: fetch-secrets.service": _SECRETS_UNITS,
    "unit: fetch-secrets.timer": _SECRETS_UNITS,
    "terraform: module": "tests/deploy/test_terraform.py::test_documented_example_passes_the_variables_of_the_module",
    "unit: logs directory": "tests/deploy/test_systemd.py::test_systemd_analyze_accepts_the_file_sink_drop_in",
}
#: An unpacked sdist has no .github.
PAGES = [
    *doc_pages.pages(),
    *(name for name in [".github/CONTRIBUTING.md"] if (ROOT / name).exists()),
]


def _is_checked(page, block):
    """Return whether the block needs a test. Pages outside docs/ only need tests for shell commands and TOML."""
    return page.startswith("docs/") or page == "README.md" or block.language in {"sh", "toml"}


BLOCKS = [
    pytest.param(page, block, id=f"{page}:{block.mark or block.text.splitlines()[0]}")
    for page in PAGES
    for block in doc_pages.blocks(doc_pages.page(page))
    if _is_checked(page, block)
]
CONFIGURATIONS = [each for each in BLOCKS if each.values[1].language == "toml" and each.values[1].mark not in RUN]


def test_each_block_has_a_test_or_a_list_of_requirements():
    for page, block in (each.values for each in BLOCKS if each.values[1].language != "toml"):
        marks = RUN.keys() | NEEDED if block.language == "sh" else RUN.keys()
        assert block.mark in marks, f"{page}: give this block a mark, and a test that runs it:\n{block.text}"


def test_every_listed_test_exists():
    for path, _, name in (test.partition("::") for test in set(RUN.values())):
        if (ROOT / path).exists():  # an unpacked sdist has no .ci
            assert re.search(rf"^(?:def )?{name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), name


def test_every_listed_mark_exists_on_a_page():
    marks = {block.mark for page in PAGES for block in doc_pages.blocks(doc_pages.page(page))}
    there = {mark for mark in RUN if (ROOT / RUN[mark].partition("::")[0]).exists()}
    assert there <= marks
    assert marks >= (NEEDED if (ROOT / ".github").exists() else set())


# ---- configurations -------------------------------------------------------------------------------------------------

#: Required keys of the tables that the reference shows only by name.
COMPLETED = {
    "[telemetry]": 'otlp_endpoint = "http://127.0.0.1:4318"',
    "[[approval.rules]]": 'name = "a"\naction = "hold"',
    "[approval.remote]": """
url = "https://portal.example.net"
token_file = "/etc/scheduled-events-bridge/token"
[[approval.remote.keys]]
kid = "k"
approver = "a"
public_key_file = "/etc/scheduled-events-bridge/k.pub"
""",
    "[[approval.remote.keys]]": """
kid = "k"
approver = "a"
public_key_file = "/etc/scheduled-events-bridge/k.pub"
[approval.remote]
url = "https://portal.example.net"
token_file = "/etc/scheduled-events-bridge/token"
""",
    "[[sinks]]": 'type = "stdout"',
    "apprise": 'urls_file = "/etc/scheduled-events-bridge/urls"',
    "command": 'command = ["true"]',
    "eventhubs": 'fully_qualified_namespace = "ns.servicebus.windows.net"\neventhub = "hub"',
    "file": 'path = "/var/log/scheduled-events-bridge/records.jsonl"',
    "webhook": 'url = "https://hooks.example.net"',
}
#: Contents of the files and variables that a configuration names, by the name of the key. The default is a plain word.
CONTENTS = {
    "url": "https://hooks.example.net/1",
    "urls": "json://hooks.example.net/1",
    "headers": "Authorization: Basic dXNlcjpwYXNz",
    "secret": "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=",
    "connection_string": "Endpoint=sb://ns.example.net;SharedAccessKeyName=send;SharedAccessKey=a2V5;EntityPath=hub",
}


#: Expected warnings of a block.
EXPECTED_WARNINGS = {"file: agent.toml": 'scope = "all"'}  # The portal needs the records of each event from every VM.


def completed(text):
    """Return the configuration *text* with the required keys of tables without keys."""
    named = text.strip()
    kind = re.fullmatch(r'\[\[sinks\]\]\ntype = "(\w+)"', named)
    other_sink = '[[sinks]]\ntype = "stdout"' if 'speak = "first"' in text else ""  # required by the recipe
    return f"{text}\n{COMPLETED.get(kind[1] if kind else named, '')}\n{other_sink}\n"


def uncommented(text):
    """Return *text* with its commented keys, except for alternatives after "# or"."""
    return re.sub(r"^(# or\b.*\n# .*\n)|^# (?=\w+ = )", r"\1", text, flags=re.MULTILINE)


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """Return a function that runs `check-config` on a text, with all files and variables that the text names."""
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))
    tmp_path.chmod(0o755)

    def fill(found):
        key, kind, value = found.groups()
        content = CONTENTS.get(key, "0123456789")
        if kind == "env":
            monkeypatch.setenv(value, content)
        elif key == "public_key":
            private = Path(value).with_suffix("")
            if not private.exists():
                generate_key(private).public_key_file.rename(value)
        else:
            Path(value).write_text(content)
            Path(value).chmod(stat.S_IRUSR | stat.S_IWUSR)
        return found[0]

    def check(text):
        for path in ("/etc/scheduled-events-bridge", "/var/log/scheduled-events-bridge", "/run/credentials"):
            text = text.replace(path, str(tmp_path))
        text = text.replace("C:\\ProgramData\\scheduled-events-bridge\\", f"{tmp_path}/")
        text = text.replace("scheduled-events-bridge.service/", "")
        text = text.replace("/opt/scheduled-events-bridge/drain.py", str(ROOT / "deploy" / "kubernetes" / "drain.py"))
        text = re.sub(r"\b(NAMESPACE|INSTANCE|RULE|REGION|dcr-ID)\b", "mine", text)  # placeholders for the reader
        program = tmp_path / "on-scheduled-event"
        program.write_text("#!/bin/sh\n")
        program.chmod(stat.S_IRWXU)
        text = text.replace("/usr/local/bin/on-scheduled-event", str(program))
        re.sub(r"""^(\w+)_(file|env) = ["']([^"']+)["']""", fill, text, flags=re.MULTILINE)
        file = tmp_path / "config.toml"
        file.write_text(text, encoding="utf-8")
        return CliRunner().invoke(commands, ["check-config", "--config", str(file)], standalone_mode=False)

    return check


@pytest.mark.skipif(sys.platform == "win32", reason="the pages show Linux paths")
@pytest.mark.parametrize("seen", [completed, uncommented], ids=["unchanged", "uncommented"])
@pytest.mark.parametrize(("page", "block"), CONFIGURATIONS)
def test_configuration_block_is_valid(page, block, seen, checked):
    if 'type = "eventlog"' in block.text:
        pytest.skip("needs Windows")
    if 'type = "apprise"' in block.text and find_spec("apprise") is None:
        pytest.skip("the extra [apprise] is not installed")
    if seen is uncommented and uncommented(block.text) == block.text:
        pytest.skip("no commented keys")
    done = checked(seen(block.text))
    problems = getattr(done.exception, "mistakes", done.exception)
    assert (problems, done.return_value) == (None, 0), done.output
    warnings = [line for line in done.output.splitlines() if line.startswith("Warning: ") and "root" not in line]
    assert [line for line in warnings if EXPECTED_WARNINGS.get(block.mark, "none") not in line] == [], page
