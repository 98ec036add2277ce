"""`portal users`: who is let in, by the database that the portal reads and with a line in the audit."""

from __future__ import annotations

import json
import shlex

import doc_pages
import pytest
from click.testing import CliRunner
from portal_kit import portal_table

from bridge.cli.commands import commands
from bridge.errors import BridgeError
from bridge.portal.settings import load

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
    assert run("users", "disable", "ann") == "ann is let in no more.\n"
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


@pytest.mark.parametrize(
    ("words", "typed", "said"),
    [
        (("users", "add", "ann"), "short\n", "at least 12 characters"),
        (("users", "add", "ann", "--no-password", "--scope", "payments"), "", "is no scope"),
        (("users", "add", "ann", "--no-password", "--scope", "labels.:x"), "", "is no scope"),
        (("users", "disable", "nobody"), "", "Nobody is called 'nobody' here"),
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
    with pytest.raises(BridgeError, match="is no name"):
        run("users", "add", name, "--no-password")
