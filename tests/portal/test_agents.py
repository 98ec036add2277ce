"""Attested agents at a running portal: tokens, records, and polls for their own VM only."""

import contextlib
import re
from pathlib import Path

import msgspec
import pytest
import requests
from fleet_records import fleet_record
from portal_kit import BATCH, RunningPortal, attested_table, batch

from bridge.config.settings import ImdsSettings
from bridge.errors import CredentialFailed
from bridge.imds.client import ImdsClient
from bridge.system.access_tokens import AttestedToken
from bridge.testing import Fault, Simulator
from bridge.testing.simulator.faults import DOCUMENT_KINDS
from sinks.cloudevent import cloud_event_bytes

PATIENCE_SECONDS = 30.0


@pytest.fixture(scope="module")
def azure():
    with Simulator(vms=["vm_0", "vm_1"], rate_limit=False) as simulator:
        yield simulator


@pytest.fixture
def table(azure, tmp_path):
    return attested_table(azure, tmp_path)


@pytest.fixture(scope="module")
def shared(azure, tmp_path_factory):
    """A portal for tests that store nothing."""
    directory = tmp_path_factory.mktemp("shared")
    with RunningPortal(directory / "portal", agents={"attested": attested_table(azure, directory)}) as running:
        yield running


@pytest.fixture(autouse=True)
def healthy(azure):
    yield
    azure.world.clear_faults("all")


@pytest.fixture
def portal(table, tmp_path):
    with RunningPortal(tmp_path / "portal", agents={"attested": table}) as running:
        yield running


@pytest.fixture
def imds(azure):
    """Return a function that returns the IMDS client of a VM by its number."""
    with contextlib.ExitStack() as stack:
        yield lambda vm=0: stack.enter_context(
            contextlib.closing(ImdsClient(ImdsSettings(endpoint=azure.endpoints[f"vm_{vm}"], timeout_seconds=10.0)))
        )


def posted(portal, path, body=b"{}", **options):
    return requests.post(f"{portal.url}{path}", data=body, timeout=PATIENCE_SECONDS, **options)


def shown(portal, document):
    return posted(portal, "/agents/token", msgspec.json.encode({"document": document}))


def challenge(portal):
    return posted(portal, "/agents/challenge").json()["nonce"]


def token_of(portal, imds, vm=0):
    return shown(portal, imds(vm).attested_document(challenge(portal))).json()["token"]


def record_of(azure, vm, **changes):
    record = fleet_record(vm, event_id=changes.pop("event_id", "e"))
    changed = msgspec.structs.replace(record.vm, **{"vm_id": azure.machines[vm].vm_id.upper(), **changes})
    return msgspec.structs.replace(record, vm=changed)


def events(portal):
    return portal.get("/events", state="all").json()["events"]


def counted(portal, word):
    return counted_in(portal.metrics(), word)


def counted_in(page, word):
    found = re.search(rf'attested_documents_total{{result="{word}"}} ([0-9.]+)', page)
    return 0 if found is None else float(found[1])


# Valid documents.


def test_vm_obtains_a_token_and_sends_its_records(portal, imds, azure):
    nonce = challenge(portal)
    answer = shown(portal, imds().attested_document(nonce))
    assert answer.status_code == 200
    assert answer.json()["expires_in"] == 3600
    assert answer.headers["Cache-Control"] == "no-store"
    record = record_of(azure, 0)
    assert portal.post(cloud_event_bytes(record), token=answer.json()["token"]).status_code == 204
    assert len(events(portal)) == 1
    assert counted(portal, "accepted") == 1


def test_repeated_documents_of_imds_recover_with_the_same_challenge(portal, imds, azure):
    azure.world.set_fault(Fault(kind="cached_nonce", count=3))
    asked, waits = [], []

    def post(path, body):
        asked.append(path)
        return posted(portal, path, body)

    token = AttestedToken(
        post, imds().attested_document, portal=portal.url, pause=lambda _, seconds: waits.append(seconds)
    )
    assert token.current(wait_seconds=PATIENCE_SECONDS).token
    token.close()
    assert asked == ["/agents/challenge", *["/agents/token"] * 4]
    assert waits == [5.0, 10.0, 20.0]
    assert counted(portal, "old_nonce") + counted(portal, "replayed") == 3


def test_preferred_nonce_accepts_a_document_with_a_cached_nonce(table, imds, azure, tmp_path):
    with RunningPortal(tmp_path / "preferring", agents={"attested": {**table, "nonce": "preferred"}}) as portal:
        azure.world.set_fault(Fault(kind="cached_nonce", count=1))
        assert token_of(portal, imds)


def test_token_survives_a_restart_and_expires_with_its_secret(portal, imds, azure, table):
    token = token_of(portal, imds)
    portal.stop()
    portal.start()
    assert portal.post(cloud_event_bytes(record_of(azure, 0)), token=token).status_code == 204
    Path(table["secret_file"]).write_text("a new secret of forty characters, or so, or more\n")
    assert portal.post(cloud_event_bytes(record_of(azure, 0)), token=token).status_code == 401


# Invalid documents and foreign records.


@pytest.mark.parametrize("kind", DOCUMENT_KINDS)
def test_invalid_document_receives_no_token(shared, imds, azure, kind):
    azure.world.set_fault(Fault(kind=kind, count=1))
    document = imds().attested_document(challenge(shared))
    before = shared.metrics()
    answer = shown(shared, document)
    assert answer.status_code in {403, 409}
    assert "token" not in answer.json()
    reason = answer.json()["reason"]
    assert counted(shared, reason) == counted_in(before, reason) + 1
    assert counted(shared, "accepted") == counted_in(before, "accepted")


@pytest.mark.parametrize("changes", [{}, {"vm_id": None}, {"vm_id": "vm_0"}])
def test_record_without_the_vm_of_the_token_rejects_the_whole_batch(portal, imds, azure, changes):
    token = token_of(portal, imds)
    foreign = record_of(azure, 1, event_id="foreign", **changes)
    for body in (batch([record_of(azure, 0), foreign]), batch([foreign])):
        assert portal.post(body, content_type=BATCH, token=token).status_code == 403
    assert events(portal) == []
    assert 'callers_refused_total{reason="not_yours"} 2' in portal.metrics()


def test_token_permits_only_polls_for_its_vm(shared, imds, azure):
    token = token_of(shared, imds)
    own, other = (machine.vm_id for machine in azure.machines)
    asked = {"token": token, "index": "0", "wait": "1"}
    assert shared.get(f"/vms/{own}/decisions", **asked).json()["decisions"] == []
    assert shared.get(f"/vms/{own.upper()}/decisions", **asked).status_code == 200
    assert shared.get(f"/vms/{other}/decisions", **asked).status_code == 403
    assert shared.get(f"/vms/{other}/decisions", **{**asked, "token": token[:-4] + "AAAA"}).status_code == 401


# Missing configuration.


def test_routes_for_attested_tokens_need_the_table(tmp_path):
    with RunningPortal(tmp_path) as portal:
        assert posted(portal, "/agents/challenge").status_code == 404
        assert posted(portal, "/agents/token").status_code == 404


def test_unreadable_secret_returns_503_until_it_is_restored(portal, table, imds, azure):
    token, file = token_of(portal, imds), Path(table["secret_file"])
    secret = file.read_text()
    for content in ("", "too short\n"):
        file.write_text(content)
        for answer in (
            posted(portal, "/agents/challenge"),
            portal.post(cloud_event_bytes(record_of(azure, 0)), token=token),
        ):
            assert answer.status_code == 503
            assert int(answer.headers["Retry-After"]) > 0
    file.write_text(secret)
    assert portal.post(cloud_event_bytes(record_of(azure, 0)), token=token).status_code == 204


def test_agent_receives_the_reason_of_a_rejected_document(table, imds, tmp_path):
    other = {**table, "subscriptions": ["00000000-0000-0000-0000-000000000000"]}
    with RunningPortal(tmp_path / "other", agents={"attested": other}) as portal:
        token = AttestedToken(
            lambda path, body: posted(portal, path, body), imds().attested_document, portal=portal.url
        )
        with pytest.raises(CredentialFailed, match=r"\(subscription_not_listed\)\. Add the VM's subscription"):
            token.current(wait_seconds=PATIENCE_SECONDS)
        token.close()
