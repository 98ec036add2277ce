"""`portal users`: who is let in, by the database that the portal reads and with a line in the audit."""

from __future__ import annotations

import json
import shlex

import click
import doc_pages
import msgspec
import pytest
from click.testing import CliRunner
from portal_kit import portal_table

from bridge.cli.commands import commands
from bridge.errors import BridgeError
from bridge.portal.settings import load
from bridge.portal.store.database import Store
from bridge.portal.store.users import add_session, session_of, user_of

PASSWORD = "correct horse battery"  # of a test


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "portal.toml"
    lines = []
    for name, table in portal_table(tmp_path / "state").items():
        lines += [f"[{name}]", *(f"{key} = '{value}'" for key, value in table.items())]
    path.write_text("\n".join(lines), encoding="utf-8")

    def invoke(*words, typed=""):
        argv = ["portal", *words[:2], "--config", str(path), *words[2:]]
        done = CliRunner().invoke(commands, argv, input=typed, standalone_mode=False)
        if done.exception is not None:
            raise done.exception
        return done.stdout

    return invoke


def test_people_are_added_listed_changed_and_disabled(run):
    assert run("users", "add", "ann", "--role", "approver", typed=f"{PASSWORD}\n") == "ann is an approver now.\n"
    assert run("users", "add", "vic", "--no-password", "--scope", "resource_group:West") == "vic is a viewer now.\n"
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
    """Return what says whether the session of Ann, an approver for one team, goes on."""
    run("users", "add", "Ann", "--role", "approver", "--scope", "labels.team:a", typed=f"{PASSWORD}\n")
    store = Store.of_file(tmp_path / "state" / "portal.db")
    at, until = "2030-01-01T00:00:00.000Z", "2030-01-02T00:00:00.000Z"
    began = {"user_name": "Ann", "new_sha256": "s", "csrf_token": "t", "at": at, "until": until}

    def goes_on():
        found = store.read(session_of, "s", at=at)
        return found if found is None else found.user

    store.write(add_session, **began)
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
        (("password", "Ann"), "Ann has another password now.\n", ("user_password_changed", {"by": "password"})),
        (
            ("password", "Ann", "--no-password"),
            "Ann has no password any more.\n",
            ("user_password_changed", {"by": "proxy"}),
        ),
        (("disable", "Ann"), "Ann is disabled.\n", ("user_disabled", {})),
        (("sign-out", "Ann"), "The sessions of Ann have ended.\n", ("user_signed_out", {})),
    ],
)
def test_each_change_ends_the_sessions_at_once_and_is_in_the_audit(run, session, words, said, entry):
    assert run("users", *words, typed="another horse battery\n") == said
    assert session() is None
    found = json.loads(run("export").splitlines()[-1])
    assert (found["actor"], found["subject"]) == ("portal users", "Ann")
    assert (found["action"], found["details"]) == entry


def test_what_is_not_named_stays_as_it_is(run, session, tmp_path):
    store = Store.of_file(tmp_path / "state" / "portal.db")
    before = session()
    run("users", "change", "Ann", "--role", "viewer")
    run("users", "disable", "Ann")
    run("users", "enable", "Ann")
    after = store.read(user_of, "ann")
    assert after == msgspec.structs.replace(before, role="viewer")
    run("users", "password", "Ann", typed="another horse battery\n")
    assert store.read(user_of, "ann").password_hash not in {before.password_hash, None}
    store.close()


def test_who_is_let_in_again_is_listed_so(run):
    run("users", "add", "ann", "--no-password")
    run("users", "disable", "ann")
    assert run("users", "enable", "ann") == "ann  viewer  all VMs\n" == run("users", "list")


def test_people_are_let_in_as_the_page_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agents.token").write_text("token\n", encoding="utf-8")
    page = doc_pages.page("docs/howto/portal.md")
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


def test_a_scope_and_all_vms_are_not_both_meant(run):
    with pytest.raises(click.UsageError, match="not both"):
        run("users", "change", "ann", "--scope", "labels.team:a", "--all-vms")


@pytest.mark.parametrize(
    ("words", "typed", "said"),
    [
        (("users", "add", "ann"), "short\n", "at least 12 characters"),
        (("users", "add", "ann", "--no-password", "--scope", "payments"), "", "is not a scope"),
        (("users", "add", "ann", "--no-password", "--scope", "labels.:x"), "", "is not a scope"),
        (("users", "disable", "nobody"), "", "No user is called 'nobody'"),
        (("users", "enable", "nobody"), "", "No user is called 'nobody'"),
        (("users", "sign-out", "nobody"), "", "No user is called 'nobody'"),
        (("users", "change", "nobody", "--all-vms"), "", "No user is called 'nobody'"),
        (("users", "change", "nobody"), "", "Nothing to change. Give --role, --scope, or --all-vms"),
        (("users", "change", "nobody", "--scope", "payments"), "", "is not a scope"),
        (("users", "password", "nobody"), "short\n", "at least 12 characters"),
        (("users", "password", "nobody"), f"{PASSWORD}\n", "No user is called 'nobody'"),
    ],
)
def test_what_cannot_be_meant_changes_nothing(run, words, typed, said):
    with pytest.raises(BridgeError, match=said):
        run(*words, typed=typed)
    run("users", "add", "vic", "--no-password")
    assert run("users", "list") == "vic  viewer  all VMs\n"


def test_person_whose_name_comes_in_another_case_is_the_same(run):
    run("users", "add", "\u00c4nn", "--role", "approver", "--no-password")
    run("users", "add", "\u00e4NN", "--no-password")
    assert run("users", "list") == "\u00c4nn  viewer  all VMs\n"
    run("users", "disable", "\u00e4nn")
    assert run("users", "list").startswith("\u00c4nn  viewer  all VMs  (disabled 20")


@pytest.mark.parametrize("name", ["", " ", "a\nb", "a\u202eb", "a" * 257])
def test_what_is_no_name_is_not_added(run, name):
    with pytest.raises(BridgeError, match="is not a valid name"):
        run("users", "add", name, "--no-password")
