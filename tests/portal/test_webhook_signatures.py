"""Records with Standard Webhooks signatures."""

import base64
import time

import pytest
from fleet_records import fleet_record
from portal_kit import RunningPortal

from bridge.portal.webhook_signatures import is_signed, usable_keys
from sinks.cloudevent import cloud_event_bytes
from sinks.http.signature import Signer

KEY = bytes(range(32))
SECRET = "whsec_" + base64.b64encode(KEY).decode()
NOW = 1_800_000_000
BODY = b'{"type": "Freeze"}'


class _Secret:
    def values(self):
        return (SECRET,)


def signed(body=BODY, *, record_id="an-id", at=NOW):
    return Signer(_Secret()).headers(record_id, body, timestamp=at)


def test_signature_by_any_of_the_keys_is_valid():
    assert is_signed(signed(), BODY, [bytes(24), KEY], NOW)


@pytest.mark.parametrize("at", [NOW - 301, NOW + 301])
def test_signature_is_valid_for_five_minutes(at):
    assert not is_signed(signed(at=at), BODY, [KEY], NOW)


@pytest.mark.parametrize(
    "changes",
    [
        {"webhook-id": "another-id"},
        {"webhook-timestamp": str(NOW + 1)},
        {"webhook-timestamp": "soon"},
        {"webhook-timestamp": "9" * 400},
        {"webhook-signature": "v1,"},
        {"webhook-signature": "v1,\u00e4"},
        {"webhook-signature": signed()["webhook-signature"].replace("v1", "v2")},
    ],
)
def test_changed_signature_is_rejected(changes):
    assert not is_signed({**signed(), **changes}, BODY, [KEY], NOW)


def test_changed_body_and_other_keys_are_rejected():
    assert not is_signed(signed(), BODY + b" ", [KEY], NOW)
    assert not is_signed(signed(), BODY, [bytes(32)], NOW)


def test_empty_and_short_secrets_are_not_usable():
    assert usable_keys(["whsec_", "nothing", "whsec_AAAA", SECRET]) == [KEY]


def test_portal_accepts_signed_records(tmp_path):
    (tmp_path / "secrets").write_text(f"{SECRET}\n", encoding="utf-8")
    (tmp_path / "secrets").chmod(0o600)
    with RunningPortal(tmp_path, agents={"webhook_secret_file": str(tmp_path / "secrets")}) as portal:
        body = cloud_event_bytes(fleet_record(0))
        headers = {name.replace("-", "_"): value for name, value in signed(body, at=int(time.time())).items()}
        assert portal.post(body + b" ", token=None, **headers).status_code == 401
        assert portal.post(body, token=None, **headers).status_code == 204
        (tmp_path / "secrets").write_text("whsec_\n", encoding="utf-8")
        assert portal.post(body, token=None, **headers).status_code == 503
