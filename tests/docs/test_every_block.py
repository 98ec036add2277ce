"""Every fenced block that a page shows is run, loaded or compared by a test; a new one that is not fails here.

How, a block says itself. TOML is a configuration: the real `check-config` must find nothing wrong with it, here. Shell
commands after `<!-- needs: ... -->` want what no test has: their marks are in the kit `shown_commands`, their words are
looked up by test_shown_commands.py. Any other block has a mark, and RUN names the test that runs, loads or compares it.
"""

from __future__ import annotations

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
_TRY = "tests/docs/test_try.py::test_newcomer_gets_a_working_webhook_and_sees_what_the_page_shows"
_APPROVAL = "tests/docs/test_first_approval.py::test_a_newcomer_approves_an_event_and_sees_it_start"
_FIRST_VM = "tests/docs/test_first_vm.py::test_a_reboot_is_announced_approved_and_told_as_the_page_says"
_GENERATED = "tests/docs/test_reference.py::test_generated_parts_are_what_the_code_says_now"
_SINK = "tests/docs/test_sink_readme.py::test_example_sends_by_either_name"
_SECRETS_UNITS = "tests/deploy/test_operate_pages.py::test_systemd_analyze_accepts_the_units_of_the_secrets_page"
_FIRST_PORTAL = "tests/portal/test_first_portal.py::test_documented_first_portal_approves_an_event_that_then_starts"
_PORTAL_PAGE = "tests/deploy/test_portal_page.py::test_documented_commands_run_back_up_restore_upgrade_and_roll_back"
#: Mark of a block -> what runs, loads or compares it.
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
    "approvals: stop": "tests/docs/test_first_vm.py::test_a_file_stops_every_approval_and_status_says_so",
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
    "keys: make and use": "tests/docs/test_shown_commands.py::test_a_decision_is_signed_as_the_page_shows",
    "example: check": "tests/docs/test_protocol.py::test_the_commands_of_the_page_check_the_example",
    "kql: transformation": (
        "tests/docs/test_operators.py::test_transformation_is_printed_as_a_data_collection_rule_takes_it"
    ),
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
    "alertmanager: route": "tests/interop/test_alertmanager.py::test_route_of_the_page_sends_info_elsewhere",
    "nginx": "tests/e2e/test_load_balancers.py::test_nginx_returns_503_during_an_event_and_200_during_an_agent_upgrade",
    "haproxy": "tests/e2e/test_load_balancers.py::"
    "test_haproxy_sends_no_new_request_to_the_vm_after_two_check_intervals",
    "rollout: duration": (
        "tests/deploy/test_management_group.py::test_documented_durations_match_the_formula_and_the_template"
    ),
    "file: rings.json": "tests/deploy/test_fleet.py::test_documented_rings_assign_each_vm",
    "ansible: rollout": "tests/deploy/test_ansible.py::test_rollout_stops_at_the_failed_ring_and_rolls_back",
    "ansible: remove": "tests/deploy/test_ansible.py::test_removal_handles_machines_with_and_without_the_agent",
    "file: fetch-secrets": "tests/docs/test_secrets.py::test_secrets_come_from_the_vault_as_the_agent_wants_them",
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


def _is_judged(page, block):
    """Return whether the block is judged here: of the folders of the code, what a person copies."""
    return page.startswith("docs/") or page == "README.md" or block.language in {"sh", "toml"}


BLOCKS = [
    pytest.param(page, block, id=f"{page}:{block.mark or block.text.splitlines()[0]}")
    for page in PAGES
    for block in doc_pages.blocks(doc_pages.page(page))
    if _is_judged(page, block)
]
CONFIGURATIONS = [each for each in BLOCKS if each.values[1].language == "toml" and each.values[1].mark not in RUN]


def test_each_block_has_a_test_or_says_what_it_needs():
    for page, block in (each.values for each in BLOCKS if each.values[1].language != "toml"):
        marks = RUN.keys() | NEEDED if block.language == "sh" else RUN.keys()
        assert block.mark in marks, f"{page}: give this block a mark, and a test that runs it:\n{block.text}"


def test_each_test_of_a_block_exists():
    for path, _, name in (test.partition("::") for test in set(RUN.values())):
        if (ROOT / path).exists():  # an unpacked sdist has no .ci
            assert re.search(rf"^(?:def )?{name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), name


def test_every_mark_is_that_of_a_block():
    marks = {block.mark for page in PAGES for block in doc_pages.blocks(doc_pages.page(page))}
    there = {mark for mark in RUN if (ROOT / RUN[mark].partition("::")[0]).exists()}
    assert there <= marks
    assert marks >= (NEEDED if (ROOT / ".github").exists() else set())


# ---- configurations -------------------------------------------------------------------------------------------------

#: What a heading of the reference, which is the name of a table alone, needs beside it.
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
#: What the files and variables hold that a configuration names, by the end of the key; others hold a word.
HELD = {
    "url": "https://hooks.example.net/1",
    "urls": "json://hooks.example.net/1",
    "headers": "Authorization: Basic dXNlcjpwYXNz",
    "secret": "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=",
    "connection_string": "Endpoint=sb://ns.example.net;SharedAccessKeyName=send;SharedAccessKey=a2V5;EntityPath=hub",
}


#: Warnings that a block is meant to cause.
MEANT = {"file: agent.toml": 'scope = "all"'}  # the portal wants to hear of each event from every VM


def completed(text):
    """Return the configuration *text*; a table that is only named gets the keys that it must have."""
    named = text.strip()
    kind = re.fullmatch(r'\[\[sinks\]\]\ntype = "(\w+)"', named)
    beside = '[[sinks]]\ntype = "stdout"' if 'speak = "first"' in text else ""  # as the recipe's page says
    return f"{text}\n{COMPLETED.get(kind[1] if kind else named, '')}\n{beside}\n"


def uncommented(text):
    """Return *text* with the keys that it shows as comments, but for one that is "# or" another."""
    return re.sub(r"^(# or\b.*\n# .*\n)|^# (?=\w+ = )", r"\1", text, flags=re.MULTILINE)


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """Return a function that has `check-config` judge a text on a machine that has all that the text names."""
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))
    tmp_path.chmod(0o755)

    def fill(found):
        key, kind, value = found.groups()
        held = HELD.get(key, "0123456789")
        if kind == "env":
            monkeypatch.setenv(value, held)
        elif key == "public_key":
            private = Path(value).with_suffix("")
            if not private.exists():
                generate_key(private).public_key_file.rename(value)
        else:
            Path(value).write_text(held)
            Path(value).chmod(stat.S_IRUSR | stat.S_IWUSR)
        return found[0]

    def check(text):
        for path in ("/etc/scheduled-events-bridge", "/var/log/scheduled-events-bridge", "/run/credentials"):
            text = text.replace(path, str(tmp_path))
        text = text.replace("C:\\ProgramData\\scheduled-events-bridge\\", f"{tmp_path}/")
        text = text.replace("scheduled-events-bridge.service/", "")
        text = text.replace("/opt/scheduled-events-bridge/drain.py", str(ROOT / "deploy" / "kubernetes" / "drain.py"))
        text = re.sub(r"\b(NAMESPACE|INSTANCE|RULE|REGION|dcr-ID)\b", "mine", text)  # what the reader replaces
        program = tmp_path / "on-scheduled-event"
        program.write_text("#!/bin/sh\n")
        program.chmod(stat.S_IRWXU)
        text = text.replace("/usr/local/bin/on-scheduled-event", str(program))
        re.sub(r"""^(\w+)_(file|env) = ["']([^"']+)["']""", fill, text, flags=re.MULTILINE)
        file = tmp_path / "config.toml"
        file.write_text(text, encoding="utf-8")
        return CliRunner().invoke(commands, ["check-config", "--config", str(file)], standalone_mode=False)

    return check


@pytest.mark.skipif(sys.platform == "win32", reason="the paths of the pages are those of Linux")
@pytest.mark.parametrize("seen", [completed, uncommented], ids=["as it is", "with what is a comment"])
@pytest.mark.parametrize(("page", "block"), CONFIGURATIONS)
def test_configuration_is_valid_in_both_variants(page, block, seen, checked):
    if 'type = "eventlog"' in block.text:
        pytest.skip("needs Windows")
    if 'type = "apprise"' in block.text and find_spec("apprise") is None:
        pytest.skip("the extra [apprise] is not installed")
    if seen is uncommented and uncommented(block.text) == block.text:
        pytest.skip("no key of it is a comment")
    done = checked(seen(block.text))
    said = getattr(done.exception, "mistakes", done.exception)
    assert (said, done.return_value) == (None, 0), done.output
    warnings = [line for line in done.output.splitlines() if line.startswith("Warning: ") and "root" not in line]
    assert [line for line in warnings if MEANT.get(block.mark, "none") not in line] == [], page
