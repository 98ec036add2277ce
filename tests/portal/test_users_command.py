"""`portal users`: changes of users in the database, their sessions, and the audit entries."""

import json
import shlex

import doc_pages
import pytest
from click.testing import CliRunner
from portal_kit import portal_config

from bridge.cli.commands import commands
from bridge.portal.settings import load
from bridge.portal.store.database import Store
from bridge.portal.store.users import add_session, session_of

PASSWORD = "correct horse battery"  # of a test


@pytest.fixture
def run(tmp_path):
    path = portal_config(tmp_path)

    def invoke(*words, typed=""):
        argv = ["portal", *words[:2], "--config", str(path), *words[2:]]
        done = CliRunner().invoke(commands, argv, input=typed, standalone_mode=False)
        if done.exception is not None:
            raise done.exception
        return done.stdout

    return invoke


def test_users_are_added_listed_changed_and_disabled(run):
    assert run("users", "add", "ann", "--role", "approver", typed=f"{PASSWORD}\n") == "ann is now an approver.\n"
    assert run("users", "add", "vic", "--no-password", "--scope", "resource_group:West") == "vic is now a viewer.\n"
    assert run("users", "list") == "ann  approver  all VMs\nvic  viewer  resource_group:west\n"
    run("users", "add", "vic", "--role", "approver", "--no-password", "--scope", "labels.team:Payments")
    assert run("users", "disable", "ann") == "ann is disabled.\n"
    listed = run("users", "list").splitlines()
    assert listed[0].startswith("ann  approver  all VMs  (disabled 20")
    assert listed[1] == "vic  approver  labels.team:Payments"
    entries = [json.loads(line) for line in run("export").splitlines()]
    assert [(entry["action"], entry["subject"]) for entry in entries] == [
        ("user_added", "ann"),
        ("user_added", "vic"),
        ("user_added", "vic"),
        ("user_disabled", "ann"),
    ]
    assert PASSWORD not in json.dumps(entries)


@pytest.fixture
def session(run, tmp_path):
    """Return a function that returns the user of Ann's session, or None after the session has ended."""
    run("users", "add", "Ann", "--role", "approver", "--scope", "labels.team:a", typed=f"{PASSWORD}\n")
    store = Store.of_file(tmp_path / "state" / "portal.db")
    at, until = "2030-01-01T00:00:00.000Z", "2030-01-02T00:00:00.000Z"
    began = {"person_key": "local ann", "session_sha256": "s", "expires_at": until, "idle_expires_at": until}

    def goes_on():
        found = store.read(session_of, "s", at=at)
        return found if found is None else found.user

    store.write(add_session, at=at, **began)
    assert goes_on().user_name == "Ann"
    yield goes_on
    store.close()


@pytest.mark.parametrize(
    ("words", "said", "entry"),
    [
        (("change", "ann", "--role", "viewer"), "Ann  viewer  labels.team:a\n", ("user_changed", {"role": "viewer"})),
        (
            ("change", "ANN", "--scope", "resource_group:West", "--scope", "labels.team:B"),
            "Ann  approver  resource_group:west, labels.team:B\n",
            ("user_changed", {"scope": ["resource_group:west", "labels.team:B"]}),
        ),
        (("change", "Ann", "--all-vms"), "Ann  approver  all VMs\n", ("user_changed", {"scope": []})),
        (("password", "Ann"), "Ann has a new password.\n", ("user_password_changed", {"by": "password"})),
        (
            ("password", "Ann", "--no-password"),
            "Ann has no password.\n",
            ("user_password_changed", {"by": "proxy"}),
        ),
        (("disable", "Ann"), "Ann is disabled.\n", ("user_disabled", {})),
        (("sign-out", "Ann"), "The sessions of Ann have ended.\n", ("user_signed_out", {})),
    ],
)
def test_each_change_ends_the_sessions_immediately_and_is_in_the_audit(run, session, words, said, entry):
    assert run("users", *words, typed="another horse battery\n") == said
    assert session() is None
    found = json.loads(run("export").splitlines()[-1])
    assert (found["actor"], found["subject"]) == ("portal users", "Ann")
    assert (found["action"], found["details"]) == entry


def test_documented_commands_create_the_users(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agents.token").write_text("token\n", encoding="utf-8")
    page = doc_pages.page("docs/howto/portal-people.md")
    configuration = doc_pages.marked(page, "portal: people configuration")
    text = f'[database]\nfile = "portal.db"\n{configuration}'
    (tmp_path / "portal.toml").write_text(text, encoding="utf-8")
    for line in doc_pages.marked(page, "portal: people").splitlines():
        argv = shlex.split(line.removeprefix("portal-venv/bin/").removeprefix("scheduled-events-bridge "))
        done = CliRunner().invoke(commands, argv, input=f"{PASSWORD}\n", standalone_mode=False)
        assert done.exception is None, (line, done.exception)
    listed = CliRunner().invoke(commands, ["portal", "users", "list", "--config", "portal.toml"])
    assert listed.stdout == "ann  approver  all VMs\nbob  approver  all VMs\nvic  viewer  labels.team:payments\n"
    signing = load(tmp_path / "portal.toml").signing
    assert (signing.kid, (tmp_path / signing.private_key_file).exists()) == ("portal-2026", True)
