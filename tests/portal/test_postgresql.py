"""PostgreSQL as the portal's database: outages, the password, roles that cannot change the audit, and commands."""

import logging
from concurrent.futures import ThreadPoolExecutor

import doc_pages
import pytest
import requests
from click.testing import CliRunner
from fleet_records import fleet_record
from portal_databases import LOCKED, Database
from portal_kit import RunningPortal, poll, portal_config
from portal_pair import Pair, bring, send
from waiting import until

from bridge.cli.commands import commands
from bridge.errors import BridgeError
from bridge.portal.audit import Entry
from bridge.portal.fleet import key_of_event_id
from bridge.portal.store.audit import add_entries, entries
from bridge.portal.store.database import Store, StoreUnavailable, epoch
from bridge.portal.store.events import event_of

AT = "2026-11-20T11:00:30.000Z"
PASSWORD = "swordfish-of-a-test"


@pytest.fixture
def config(tmp_path, postgresql_database):
    return portal_config(tmp_path, database=postgresql_database.table)


def run(*words, **more):
    done = CliRunner().invoke(commands, ["portal", *map(str, words)], standalone_mode=False, **more)
    if done.exception is not None:
        raise done.exception
    return done


def ready(portal):
    answer = requests.get(f"{portal.operator_url}/readyz", timeout=20)
    return answer.status_code, answer.json()


def test_concurrent_migrations_create_one_database(postgresql):
    with postgresql.database(is_empty=True) as database:
        stores = [database.store() for _ in range(4)]
        with ThreadPoolExecutor(len(stores)) as pool:
            found = sorted(pool.map(Store.migrate, stores), key=str)
        assert found == [("0001", "0001")] * 3 + [(None, "0001")]
        assert len({store.read(epoch) for store in stores}) == 1


# Outages.


def test_portal_reports_a_database_outage_and_recovers(tmp_path, postgresql, caplog):
    caplog.set_level(logging.INFO)
    with postgresql.database() as database:
        pair = Pair(tmp_path, database)
        with pair.portal("one") as one:
            index = poll(one.url)["index"]
            postgresql.stop()
            try:
                status, said = ready(one)
                assert (status, said["status"]) == (503, "not ready")
                assert said["why"].startswith("The portal's database is not available: ")
                assert send(one.url, [fleet_record(0)]).status_code == 503
                token = pair.signer.sign()
                assert bring(one.url, token).status_code == 503
                assert poll(one.url, index=index, wait=1)["decisions"] == []
                until(lambda: "No agent gets new decisions." in caplog.text)
                until(lambda: "arrive up to one second late" in caplog.text)
            finally:
                postgresql.start()
            until(lambda: ready(one)[0] == 200, seconds=60)
            assert send(one.url, [fleet_record(0)]).status_code == 204
            assert bring(one.url, token).status_code == 200
            assert poll(one.url, index=index, wait=30)["decisions"] == [token]
            until(lambda: "Agents get new decisions again." in caplog.text, seconds=60)
            until(lambda: "arrive immediately again" in caplog.text, seconds=60)


# The password.


@pytest.fixture
def locked(tmp_path, postgresql, postgresql_database):
    """The `[database]` table of a role with a password, the password file, and a function that changes the password."""
    name = postgresql_database.name
    postgresql.sql(name, f"DROP OWNED BY {LOCKED}" if _has_role(postgresql) else f"CREATE ROLE {LOCKED} LOGIN")

    def change(password):
        postgresql.sql(name, f"ALTER ROLE {LOCKED} PASSWORD '{password}'")

    change(PASSWORD)
    postgresql.sql(name, f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {LOCKED}")
    file = tmp_path / "password"
    file.write_text(f"{PASSWORD}\n", encoding="utf-8")
    return Database({"url": postgresql.url(name, LOCKED), "password_file": str(file)}), file, change


def _has_role(server):
    return bool(server.sql("postgres", "SELECT 1 FROM pg_roles WHERE rolname = %s", LOCKED))


def test_changed_password_file_applies_to_the_next_connection(locked):
    database, file, change = locked
    store = database.store()
    assert store.read(epoch)
    change("another-password")
    store.close()
    with pytest.raises(StoreUnavailable, match="password authentication failed"):
        store.read(epoch)
    file.write_text("another-password\n", encoding="utf-8")
    assert store.read(epoch)
    file.unlink()
    assert store.read(epoch)  # over the open connection
    store.close()
    with pytest.raises(StoreUnavailable, match=r"The file .*/password of database.password_file cannot be read"):
        store.read(epoch)
    database.close()


def test_errors_and_logs_do_not_contain_the_password(locked, caplog):
    database, _, change = locked
    with caplog.at_level(logging.DEBUG):
        store = database.store()
        assert store.read(epoch)
        change("another-password")
        store.close()
        with pytest.raises(StoreUnavailable) as refused:
            store.read(epoch)
        database.close()
    whole = f"{refused.value} {refused.value!r} {refused.value.__cause__!r} {store.engine} {store.kind}"
    assert PASSWORD not in whole + caplog.text


# Roles and transactions.


def statements(mark):
    """Return the SQL statements that the page shows to the database administrator."""
    text = doc_pages.marked(doc_pages.page("docs/operate/portal-postgresql.md"), mark)
    return [line for line in text.splitlines() if line]


@pytest.fixture
def roles_of_the_page(postgresql):
    """A database `portal` of the role `portal`, and an insert-only role whose grants the fixture returns."""
    create_role, create_database = statements("postgresql: database")
    create_other, *grants = statements("postgresql: a role that may only add")
    for statement in (create_role, create_database, create_other):
        postgresql.sql("postgres", statement)
    yield grants
    postgresql.sql("postgres", "DROP DATABASE portal WITH (FORCE)")
    for role in ("portal", "portal_serves"):
        postgresql.sql("postgres", f"DROP ROLE {role}")


def test_documented_roles_can_serve_but_not_change_the_audit(tmp_path, postgresql, roles_of_the_page):
    owner = Database({"url": postgresql.url("portal", "portal")})
    owner.store().migrate()
    for grant in roles_of_the_page:
        owner.store().write(lambda connection, words=grant: connection.exec_driver_sql(words))
    serves = Database({"url": postgresql.url("portal", "portal_serves")})
    with RunningPortal(tmp_path, database=serves.table) as portal:
        portal.send(fleet_record(0))
        assert [each["action"] for each in portal.get("/audit").json()["entries"]] == ["started"]
    for statement in ("UPDATE audit SET actor = 'eve'", "DELETE FROM audit", "DROP TABLE audit"):
        with pytest.raises(StoreUnavailable, match=r"permission denied|must be owner"):
            serves.store().write(lambda connection, words=statement: connection.exec_driver_sql(words))
    for database in (owner, serves):
        database.close()


def test_read_transaction_has_one_snapshot_and_cannot_write(postgresql_database):
    store = postgresql_database.store()
    new = Entry(actor="ada", action="approved", subject="", details={})

    def twice(connection):
        before = entries(connection, after=0)
        store.write(add_entries, [new], at=AT)
        return before, entries(connection, after=0)

    before, after = store.read(twice)
    assert before == after == []
    with pytest.raises(StoreUnavailable, match="read-only transaction"):
        store.read(add_entries, [new], at=AT)


@pytest.mark.parametrize("path", ["/events/a%00b", "/events?group=labels.a:%00&state=all"])
def test_address_with_nul_is_handled(tmp_path, database, path):
    with RunningPortal(tmp_path / "portal", database=database.table) as portal:
        assert portal.get(path).status_code in {200, 404}


# The commands.


def test_missing_tables_are_reported(tmp_path, postgresql):
    with postgresql.database(is_empty=True) as empty:
        config = portal_config(tmp_path, database=empty.table)
        with pytest.raises(BridgeError, match=r"No database exists at postgresql:.* `portal migrate` creates it"):
            run("export", "--config", config)
        assert "empty database was migrated to step" in run("migrate", "--config", config).stdout
        assert run("export", "--config", config).stdout == ""


def test_backup_prints_a_pg_dump_command_and_the_restored_copy_has_a_new_epoch(
    config, tmp_path, postgresql, postgresql_database
):
    with pytest.raises(BridgeError) as said:
        run("backup", "--config", config, tmp_path / "copy")
    command = str(said.value).partition(": ")[2]
    assert command.startswith("pg_dump --format=custom --exclude-table-data=properties ")
    run("users", "add", "ann", "--no-password", "--config", config)
    postgresql.shell(command)
    with postgresql.database(is_empty=True) as empty:
        postgresql.run("pg_restore", "--no-owner", "-d", empty.table["url"], tmp_path / "copy")
        copy, original = empty.store(), postgresql_database.store()
        before, now = copy.migrate()
        assert before == now
        assert copy.read(entries, after=0) == original.read(entries, after=0) != []
        assert copy.read(epoch) != original.read(epoch)
        assert copy.read(event_of, key_of_event_id("A"), now="") is None
        with pytest.raises(StoreUnavailable, match="cannot be changed or deleted"):
            copy.write(lambda connection: connection.exec_driver_sql("DELETE FROM audit"))
