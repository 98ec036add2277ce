"""The commands of `portal`: migrate, check-config, backup, audit verify, and export."""

import csv
import io
import json

import pytest
from click.testing import CliRunner
from portal_kit import portal_config

from bridge.cli.commands import commands
from bridge.errors import BridgeError
from bridge.portal.audit import Entry
from bridge.portal.store.audit import add_entries
from bridge.portal.store.database import Store

AT = "2026-11-20T11:00:30.000Z"


@pytest.fixture
def config(tmp_path):
    return portal_config(tmp_path)


@pytest.fixture
def store(tmp_path):
    store = Store.of_file(tmp_path / "state" / "portal.db")
    store.migrate()
    for actor in ("ada", "=cmd|' /C calc'!A0", "grace"):
        store.write(add_entries, [Entry(actor=actor, action="approved", subject="e", details={"a": [1]})], at=AT)
    yield store
    store.close()


def run(*words):
    done = CliRunner().invoke(commands, ["portal", *map(str, words)], standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return done


def test_migrate_creates_the_database_once(config):
    assert run("migrate", "--config", config).stdout == "The empty database was migrated to step 0001.\n"
    assert "already at step" in run("migrate", "--config", config).stdout


def test_check_config_names_the_database_that_the_portal_will_create(config, tmp_path):
    file, check = tmp_path / "state" / "portal.db", ("check-config", "--connect", "--config", config)
    new = f"The portal creates the database {file} when it starts.\n"
    assert run(*check).stdout == f"The configuration is valid.\n{new}"
    assert not file.exists()
    run("migrate", "--config", config)
    assert run(*check).stdout == "The configuration is valid.\n"
    text = config.read_text()
    config.write_text(text.replace(str(file), str(config / "portal.db")))
    assert run(*check).stderr == (
        f"Problem: database: {config}/portal.db does not exist, and the portal cannot create it in {config}.\n"
    )


def test_check_config_reports_all_problems_at_once(config, tmp_path):
    assert run("check-config", "--config", config).stdout == "The configuration is valid.\n"
    token = tmp_path / "reader.token"
    token.write_text("reader-token-1")
    token.chmod(0o644)
    rest = f"[readers]\ntoken_file = '{token}'\n[signing]\nkid = 'p1'\nprivate_key_file = '{tmp_path / 'none'}'\n"
    tables = f"[inventory]\nfile = '{tmp_path / 'vms.csv'}'\n[[keys]]\nkid = 'k'\napprover = 'ada'\n"
    text = config.read_text().replace("[readers]", "[readers]\n#").split("[readers]")[0]
    config.write_text(f"{text}{rest}{tables}public_key_file = '{tmp_path / 'k.pub'}'\n")
    done = run("check-config", "--config", config)
    assert done.return_value == 1
    for part in ("readers.token_file: ", "signing.private_key_file: ", "inventory.file: ", "k.pub"):
        assert part in done.stderr
    assert done.stderr.count("Problem: ") == 4


def test_check_config_connects_to_the_identity_provider_and_the_database(config, tmp_path):
    (tmp_path / "state").mkdir(exist_ok=True)
    (tmp_path / "state" / "portal.db").write_bytes(b"no database" * 100)
    provider = "[people.oidc]\nissuer = 'http://127.0.0.1:9'\nclient_id = 'portal'\nclient_secret_env = 'SECRET'\n"
    groups = "[[people.oidc.groups]]\ngroup = 'ops'\nrole = 'viewer'\n"
    origin = "[people]\norigin = 'http://127.0.0.1:8443'\n"
    config.write_text(config.read_text().replace("[people]", "#") + f"\n{origin}{provider}{groups}")
    done = CliRunner().invoke(
        commands,
        ["portal", "check-config", "--connect", "--config", str(config)],
        env={"SECRET": "x" * 40},
        standalone_mode=False,
    )
    assert done.return_value == 1, done.output
    assert "Problem: database: " in done.stderr
    assert "Problem: people.oidc: The identity provider is not available." in done.stderr


@pytest.mark.usefixtures("store")
def test_verify_prints_the_number_of_valid_entries(config):
    last = json.loads(run("export", "--config", config).stdout.splitlines()[-1])["hash"]
    done = run("audit", "verify", "--config", config)
    assert (done.return_value, done.stdout) == (
        0,
        f"All 3 entries are valid. The last hash is {last}.\n",
    )


def test_verify_names_the_first_changed_entry_and_exits_with_1(store, config):
    def tamper(connection):
        connection.exec_driver_sql("DROP TRIGGER audit_no_update")
        connection.exec_driver_sql("UPDATE audit SET actor = 'eve' WHERE entry >= 2")

    store.write(tamper)
    done = run("audit", "verify", "--config", config)
    assert done.return_value == 1
    assert done.stderr == "Entry 2 of 3 is invalid: it was changed.\n"


@pytest.mark.usefixtures("store")
def test_export_prints_one_entry_per_line(config):
    lines = run("export", "--config", config).stdout.splitlines()
    assert [json.loads(line)["actor"] for line in lines] == ["ada", "=cmd|' /C calc'!A0", "grace"]


@pytest.mark.usefixtures("store")
def test_csv_export_escapes_formulas(config):
    rows = list(csv.DictReader(io.StringIO(run("export", "--format", "csv", "--config", config).stdout)))
    assert [row["actor"] for row in rows] == ["ada", "'=cmd|' /C calc'!A0", "grace"]
    assert json.loads(rows[0]["details"]) == {"a": [1]}


@pytest.mark.usefixtures("store")
def test_backup_creates_a_usable_database_and_never_overwrites(config, tmp_path):
    run("backup", "--config", config, tmp_path / "copy.db")
    copy = Store.of_file(tmp_path / "copy.db")
    assert copy.migrate() == ("0001", "0001")
    copy.close()
    before = (tmp_path / "copy.db").read_bytes()
    with pytest.raises(BridgeError, match="does not overwrite a file"):
        run("backup", "--config", config, tmp_path / "copy.db")
    assert (tmp_path / "copy.db").read_bytes() == before


@pytest.mark.parametrize("words", [("audit", "verify"), ("export",), ("backup", "copy.db")])
def test_commands_report_a_missing_database(config, words):
    with pytest.raises(BridgeError, match="No database exists at"):
        run(*words, "--config", config)
