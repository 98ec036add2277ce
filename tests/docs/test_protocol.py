"""Compares PROTOCOL.md with the code: the worked example, and all reasons, claims, and limits."""

import json
import re
import shutil
import subprocess
from datetime import datetime, timezone
from importlib import resources

import msgspec
import pytest
from signed_decisions import sign_decision
from vectors import make

from bridge.approval import decision_token as token_module
from bridge.approval.credentials import TOKEN_DEADLINE_SECONDS
from bridge.approval.decision_token import verify
from bridge.approval.digest import canonical_json, digest
from bridge.approval.portal_client import (
    MAX_ANSWER_BYTES,
    MAX_DECISIONS,
    MAX_EPOCH_CHARACTERS,
    MAX_INDEX,
)
from bridge.approval.refusal_reasons import RefusalReason
from bridge.config.trusted_keys import MAX_NAME_CHARACTERS, TrustedKey
from bridge.events.event import ScheduledEvent, encode
from bridge.events.record import decode_record
from bridge.system import access_tokens
from bridge.system.access_tokens import DocumentRefusal

PAGE = (resources.files("bridge.approval") / "PROTOCOL.md").read_text(encoding="utf-8")
EXAMPLES = {
    name: text.removesuffix("\n")
    for name, text in re.findall(r"<!-- example: (\w+) -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)
}


def _section(number):
    return re.search(rf"^## {number} .*?(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL).group()


def _table(number):
    """Return the rows of the tables in section *number*, as cells."""
    rows = [line for line in _section(number).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def _event():
    return msgspec.convert({"event_status": "Scheduled", **json.loads(EXAMPLES["event"])}, ScheduledEvent)


def _noon(seconds=0):
    return datetime.fromtimestamp(json.loads(EXAMPLES["payload"])["iat"] + seconds, tz=timezone.utc)


def test_example_digest_matches_the_code():
    assert canonical_json(_event()).decode() == EXAMPLES["canonical"]
    assert digest(_event()) == EXAMPLES["digest"] == json.loads(EXAMPLES["payload"])["event_digest"]


def test_example_token_matches_the_code(tmp_path):
    (tmp_path / "private.pem").write_text(EXAMPLES["private"])
    (tmp_path / "private.pem").chmod(0o600)
    claims = json.loads(EXAMPLES["payload"])
    token = sign_decision(
        tmp_path / "private.pem",
        kid=json.loads(EXAMPLES["header"])["kid"],
        approver=claims["iss"],
        vm_id=claims["aud"],
        event=_event(),
        decision=claims["decision"],
        reason=claims["reason"],
        valid_seconds=claims["exp"] - claims["iat"],
        now=_noon(),
        jti=claims["jti"],
    )

    assert token == EXAMPLES["token"]
    header, payload, _ = token.split(".")
    assert make.unb64(header).decode() == EXAMPLES["header"]
    assert make.unb64(payload).decode() == EXAMPLES["payload"]


def test_vm_accepts_the_example_token_with_the_documented_key(tmp_path):
    (tmp_path / "public.pem").write_text(EXAMPLES["public"])
    key = TrustedKey(kid="ops-2026", approver="portal", public_key_file=tmp_path / "public.pem")
    decision = verify(
        EXAMPLES["token"],
        keys=[key],
        audience=json.loads(EXAMPLES["payload"])["aud"],
        now=_noon(5),
        created_at=_noon(-5),
    )

    assert decision.event_digest == digest(_event())
    assert decision.expires_at.isoformat() == "2026-11-20T12:00:00+00:00"
    assert "2026-11-20T12:00:00Z" in _section(7)


@pytest.mark.skipif(
    not all(map(shutil.which, ("openssl", "sha256sum", "base64"))), reason="needs OpenSSL and coreutils"
)
def test_documented_openssl_commands_verify_the_example(tmp_path):
    (tmp_path / "canonical").write_text(EXAMPLES["canonical"])
    (tmp_path / "token").write_text(EXAMPLES["token"] + "\n")
    (tmp_path / "public.pem").write_text(EXAMPLES["public"] + "\n")
    run = subprocess.run(
        ["sh", "-e", "-c", EXAMPLES["check"]], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )

    assert run.stdout.splitlines()[0] == EXAMPLES["digest"]
    assert "Signature Verified Successfully" in run.stdout, run.stderr


def test_refusal_reasons_are_documented_in_the_order_of_the_checks():
    rows = [row for row in _table(10) if row[0].startswith("`")]

    assert [row[0].strip("`") for row in rows] == [reason.value for reason in RefusalReason]
    assert [row[1] for row in rows] == ["before the signature"] * 7 + ["after it"] * (len(rows) - 7)


def test_documented_claims_match_the_signed_claims():
    listed = {row[0].strip("`") for row in _table(5) if row[0].startswith("`")}

    assert listed == {*json.loads(EXAMPLES["payload"]), "nbf", *json.loads(EXAMPLES["header"])}


def test_example_record_is_valid_and_contains_the_example_event():
    record = decode_record(EXAMPLES["record"])

    assert json.loads(encode(record)) == json.loads(EXAMPLES["record"]), "the members differ"
    assert list(json.loads(EXAMPLES["record"])) == list(record.__struct_fields__)
    assert json.loads(EXAMPLES["event"]).items() <= json.loads(EXAMPLES["record"])["event"].items()
    assert record.vm.vm_id == json.loads(EXAMPLES["payload"])["aud"]
    assert digest(record.event) == EXAMPLES["digest"]


def test_documented_response_limits_match_the_code():
    text = " ".join(_section(3).split())

    assert MAX_ANSWER_BYTES - 2 * token_module.MAX_TOKEN_CHARACTERS == 1_032_192
    assert f"{MAX_DECISIONS:,} decisions, or more than 1,032,192 characters of decisions" in text
    assert MAX_INDEX == 2**53 - 1
    assert f"not a string of 1 to {MAX_EPOCH_CHARACTERS} characters" in _section(4)


def test_documented_token_limits_match_the_code():
    text = _section(5)

    assert f"{token_module.MAX_HEADER_CHARACTERS} characters in base64url" in text
    assert f"at most {token_module.MAX_TOKEN_CHARACTERS:,}" in text
    assert f"({token_module.MAX_LIFETIME_SECONDS:,} s)" in text
    assert f"`exp` + {token_module.CLOCK_SKEW_SECONDS} s" in text
    assert f"Cut at {token_module.MAX_REASON_CHARACTERS} characters" in text
    assert f"1 to {token_module.MAX_EVENT_ID_CHARACTERS} characters" in text
    assert f"`{token_module.TOKEN_TYPE}`" in text
    assert f"1 to {MAX_NAME_CHARACTERS} printable ASCII characters" in text
    assert f"1 to {MAX_NAME_CHARACTERS} printable characters" in text
    assert f"from 0 to {token_module._LAST_SECOND}" in text


def test_document_refusal_reasons_are_documented_in_the_order_of_the_checks():
    rows = [row for row in _table(2) if row[0].strip("`") in {each.value for each in DocumentRefusal}]

    assert [row[0].strip("`") for row in rows] == [each.value for each in DocumentRefusal]
    assert [row[1] == "409" for row in rows] == [each.is_stale for each in DocumentRefusal]


def test_documented_limits_of_attested_tokens_match_the_code():
    text = " ".join(_section(2).split())
    limits = {kind: msgspec.inspect.type_info(kind) for kind in (access_tokens.Challenge, access_tokens.TokenAnswer)}
    nonce, _ = limits[access_tokens.Challenge].fields
    token, expires_in = limits[access_tokens.TokenAnswer].fields

    assert f"{nonce.type.min_length} to {nonce.type.max_length} of the characters" in text
    assert f"{token.type.min_length} to {token.type.max_length:,} visible ASCII characters" in text
    assert f"a whole number from {expires_in.type.ge} to {expires_in.type.le:,}" in text
    assert f"must not be larger than {access_tokens.MAX_ANSWER_BYTES // 1024} KiB" in text
    assert f"waits up to {TOKEN_DEADLINE_SECONDS:g} seconds" in text
    for path in (access_tokens.CHALLENGE_PATH, access_tokens.TOKEN_PATH):
        assert f"POST {{url}}{path} HTTP/1.1" in text
