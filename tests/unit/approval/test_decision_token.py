"""Verification of decision tokens: invalid tokens are refused with the exact reason, which reveals no claims."""

import json
import os
import stat
from base64 import b64encode
from datetime import datetime, timedelta, timezone
from pathlib import Path

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st
from signed_decisions import sign_decision
from vectors import make
from vectors.make import EVENT, NOW, PORTAL, VM_ID, b64, claims, header, token, unb64

from bridge.approval.decision_token import Claims, RefusedDecision, verify
from bridge.approval.digest import digest
from bridge.approval.refusal_reasons import RefusalReason
from bridge.approval.signing import generate_key
from bridge.config.trusted_keys import TrustedKey, key_mistakes, unusable_keys
from bridge.errors import KeyUnusable, SigningFailed
from bridge.events.record import Verdict

VECTORS = Path(__file__).parents[1] / "vectors"
SAVED = json.loads((VECTORS / "decisions.json").read_text(encoding="ascii"))
ACCEPTED = [case for case in SAVED["cases"] if case["refused"] is None]
REFUSED = [case for case in SAVED["cases"] if case["refused"] is not None]
BEFORE_THE_SIGNATURE = list(RefusalReason)[: list(RefusalReason).index(RefusalReason.MALFORMED_CLAIMS)]
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"


def moment(seconds):
    return datetime.fromtimestamp(seconds, tz=timezone.utc)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    directory = tmp_path_factory.mktemp("keys")
    for key in SAVED["keys"]:
        (directory / f"{key['kid']}.pub").write_text(key["public_key_pem"])
    return tuple(
        TrustedKey(kid=key["kid"], approver=key["approver"], public_key_file=directory / f"{key['kid']}.pub")
        for key in SAVED["keys"]
    )


def checked(text, keys, *, audience=VM_ID, now=NOW, created_at=NOW - 7200):
    return verify(text, keys=keys, audience=audience, now=moment(now), created_at=moment(created_at))


def refusal(text, keys, **circumstances):
    with pytest.raises(RefusedDecision) as caught:
        checked(text, keys, **circumstances)
    return caught.value


@pytest.mark.parametrize("name", ["decisions.json", "digests.json"])
def test_generated_tokens_match_the_vectors(name):
    assert (VECTORS / name).read_text(encoding="ascii") == make.rendered()[name], "run tests/unit/vectors/make.py"


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: case["name"])
def test_valid_decision_is_accepted(case, keys):
    decision = checked(case["token"], keys)
    said = json.loads(unb64(case["token"].split(".")[1]))

    assert type(decision) is Claims
    assert (decision.decision_id, decision.event_id) == (said["jti"], EVENT.event_id)
    assert decision.approver == said["iss"]
    assert decision.verdict.value == said["decision"]
    assert decision.issued_at == moment(said["iat"])
    assert decision.expires_at == moment(said["exp"])
    assert decision.event_digest == digest(EVENT)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: f"{case['refused']}: {case['name']}")
def test_invalid_decision_is_refused_with_the_correct_reason(case, keys):
    refused = refusal(case["token"], keys)

    assert refused.reason == RefusalReason(case["refused"])
    assert (refused.approver is None) == (refused.reason in BEFORE_THE_SIGNATURE)
    assert len(str(refused)) < 600


def _everything_said(error):
    """Return all text that a record, a log, or a traceback could contain about *error* and its causes."""
    said = []
    while error is not None:
        said.append(repr((type(error), error.args, vars(error), getattr(error, "doc", None))))
        error = error.__cause__ or error.__context__
    return " ".join(said)


def test_refusal_never_contains_claims_of_an_unverified_token(keys):
    marked = claims(iss="MARKED", sub="MARKED", jti="MARKED", reason="MARKED", decision="MARKED")
    marked_header = header(kid="MARKED", extra="MARKED")
    tokens = [
        token(marked, header(), by=make.STRANGER),
        *(token(marked, {**marked_header, **part}) for part in ({}, {"alg": "MARKED"}, {"typ": "MARKED"})),
        token(marked, {"alg": "EdDSA", "typ": "scheduled-events-decision+jwt", "kid": "MARKED"}),
        token(marked, b'{"kid":"MARKED",'),
        token(marked, b'{"kid":"MARKED","kid":"MARKED"}'),
        "MARKED.MARKED.MARKED",
        "MARKED",
    ]
    for text in tokens:
        refused = refusal(text, keys)

        assert refused.reason in BEFORE_THE_SIGNATURE
        assert (refused.approver, refused.claims) == (None, None)
        assert "MARKED" not in _everything_said(refused)
        assert b64(b"MARKED") not in _everything_said(refused)


@given(st.data())
def test_change_of_any_character_of_a_token_is_refused(keys, data):
    good = token()
    at = data.draw(st.integers(0, len(good) - 1))
    other = data.draw(st.sampled_from([*(ALPHABET + ".=+/ \n"), "", "é", "\ud800", "\u0000"]))
    changed = good[:at] + other + good[at + 1 :]
    if changed != good:
        assert refusal(changed, keys).reason in BEFORE_THE_SIGNATURE


@given(
    st.dictionaries(
        st.sampled_from([*claims(), "nbf", "other"]),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers(), max_size=2),
    )
)
def test_any_signed_claims_are_accepted_or_refused_with_a_reason(keys, changes):
    text = token(json.dumps(claims(**changes)).encode())
    try:
        decision = checked(text, keys)
    except RefusedDecision as refused:
        assert refused.reason not in BEFORE_THE_SIGNATURE or refused.reason is RefusalReason.MALFORMED  # noqa: PT017
    else:
        assert decision.audience.lower() == VM_ID
        assert decision.expires_at - decision.issued_at <= timedelta(hours=24)


def test_decision_is_refused_while_the_vm_id_is_unknown(keys):
    assert refusal(token(), keys, audience="").reason is RefusalReason.WRONG_AUDIENCE


def test_reason_is_truncated_and_has_no_control_characters(keys):
    assert checked(token(claims(reason="a\r\n\x1b[31mb\u202ec\x00")), keys).reason == "a   [31mb c "
    assert checked(token(claims(reason="x" * 999)), keys).reason == "x" * 256
    assert checked(token(claims(reason="\ud800")), keys).reason == " "


def test_decision_is_valid_within_the_clock_skew_only(keys):
    text = token(claims(iat=NOW, exp=NOW + 10))

    assert checked(text, keys, now=NOW - 60)
    assert checked(text, keys, now=NOW + 69.9)
    assert refusal(text, keys, now=NOW - 60.1).reason is RefusalReason.NOT_YET_VALID
    assert refusal(text, keys, now=NOW + 70).reason is RefusalReason.EXPIRED


def test_decision_issued_when_the_outbox_was_created_is_accepted(keys):
    assert checked(token(claims(iat=NOW)), keys, created_at=NOW)
    assert refusal(token(claims(iat=NOW)), keys, created_at=NOW + 0.001).reason is (
        RefusalReason.ISSUED_BEFORE_THIS_OUTBOX
    )


def _pem(key):
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _small_order(y):
    raw = y.to_bytes(32, "little")
    prefix = bytes.fromhex("302a300506032b6570032100")
    return b"-----BEGIN PUBLIC KEY-----\n%s\n-----END PUBLIC KEY-----\n" % b64encode(prefix + raw)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "one public key in PEM"),
        (b"nonsense", "one public key in PEM"),
        (b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", "not a public key in PEM"),
        (PORTAL.public_pem.encode() * 2, "one public key in PEM"),
        (PORTAL.public_pem.encode() + b" " * 20000, "one public key in PEM"),
        (PORTAL.private_pem.encode(), "private key"),
        (_pem(ed448.Ed448PrivateKey.generate().public_key()), "Ed448PublicKey"),
        (_pem(rsa.generate_private_key(65537, 2048).public_key()), "RSAPublicKey"),
        (_pem(ec.generate_private_key(ec.SECP256R1()).public_key()), "another kind"),
        (_small_order(0), "small order"),
        (_small_order(1), "small order"),
        (_small_order(2**255), "small order"),
        (_small_order(2**255 - 20), "small order"),
    ],
)
def test_key_file_without_an_ed25519_key_is_rejected_with_the_reason(tmp_path, content, says):
    path = tmp_path / "key.pub"
    path.write_bytes(content)
    key = TrustedKey(kid="ops", approver="portal", public_key_file=path)

    with pytest.raises(KeyUnusable, match=says) as caught:
        key.load()
    assert str(path) in str(caught.value)
    assert str(caught.value).endswith(".")


def test_key_file_is_loaded_when_created_and_dropped_when_deleted(tmp_path):
    path = tmp_path / "ops.pub"
    keys = [TrustedKey(kid=PORTAL.kid, approver="portal", public_key_file=path)]

    assert refusal(token(), keys).reason is RefusalReason.KEY_UNUSABLE
    path.write_text(PORTAL.public_pem)
    assert checked(token(), keys)
    path.write_text(make.ALICE.public_pem)
    os.utime(path, (1, 1))  # as on a file system with coarse timestamps
    assert refusal(token(), keys).reason is RefusalReason.FORGED
    path.unlink()
    refused = refusal(token(), keys)
    assert refused.reason is RefusalReason.KEY_UNUSABLE
    assert str(path) in str(refused)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a named pipe")
def test_named_pipe_as_key_file_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "key")

    with pytest.raises(KeyUnusable, match=r"not a regular file\. Put a public key in PEM there"):
        TrustedKey(kid="ops", approver="portal", public_key_file=tmp_path / "key").load()


def test_keys_with_a_duplicate_kid_are_unusable(keys):
    assert refusal(token(), [*keys, keys[0]]).reason is RefusalReason.KEY_UNUSABLE


def test_all_errors_in_the_keys_are_reported_together(tmp_path, keys):
    path = keys[0].public_key_file
    wrong = (
        TrustedKey(kid="ops-2026", approver="x", public_key_file=path),
        TrustedKey(kid="second", approver="bob", public_key_file=path),
        TrustedKey(kid="gone", approver="bob", public_key_file=tmp_path / "gone"),
        TrustedKey(kid="", approver="a\nb", public_key_file=keys[1].public_key_file),
    )

    assert key_mistakes(keys) == ()
    said = "\n".join(key_mistakes([*keys, *wrong]))
    for part in (
        "'ops-2026' occurs 2 times",
        "'second' and kid 'ops-2026' are the same key",
        "kid ''",
        r"'a\nb'",
    ):
        assert part in said
    (why,) = unusable_keys([*keys, *wrong])
    assert str(tmp_path / "gone") in why


def test_generated_key_pair_is_private_and_signs_valid_decisions(tmp_path):
    pair = generate_key(tmp_path / "ops")
    public = serialization.load_pem_public_key(pair.public_key_file.read_bytes())

    assert pair.public_key_file == tmp_path / "ops.pub"
    assert isinstance(public, Ed25519PublicKey)
    if os.name == "posix":
        assert stat.S_IMODE(pair.private_key_file.stat().st_mode) == 0o600
        assert stat.S_IMODE(pair.public_key_file.stat().st_mode) & 0o600 == 0o600
    keys = [TrustedKey(kid="ops", approver="portal", public_key_file=pair.public_key_file)]
    decision = checked(signed(pair.private_key_file, reason="déjà vu"), keys)
    assert decision.verdict is Verdict.APPROVE
    assert decision.reason == "déjà vu"
    assert decision.event_digest == digest(EVENT)
    assert decision.expires_at - decision.issued_at == timedelta(hours=24)


@pytest.mark.parametrize("existing", ["ops", "ops.pub"])
def test_existing_key_is_never_overwritten_and_no_partial_pair_remains(tmp_path, existing):
    (tmp_path / existing).write_text("precious")

    with pytest.raises(SigningFailed, match="never overwritten"):
        generate_key(tmp_path / "ops")
    assert [path.name for path in tmp_path.iterdir()] == [existing]
    assert (tmp_path / existing).read_text() == "precious"


@pytest.mark.skipif(os.name != "posix", reason="needs symbolic links")
def test_key_is_not_written_through_a_symbolic_link(tmp_path):
    (tmp_path / "ops").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(SigningFailed):
        generate_key(tmp_path / "ops")
    assert not (tmp_path / "elsewhere").exists()


def signed(private_key_file, **changes):
    values = {
        "kid": "ops",
        "approver": "portal",
        "vm_id": VM_ID,
        "event": EVENT,
        "decision": "approve",
        "now": moment(NOW + 0.1234),
        "valid_seconds": 86400,
        **changes,
    }
    return sign_decision(private_key_file, **values)


def test_decision_that_agents_would_reject_is_not_signed(tmp_path):
    private = generate_key(tmp_path / "ops").private_key_file
    (tmp_path / "rsa").write_bytes(
        rsa.generate_private_key(65537, 2048).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    nameless = make._event(event_id=None)
    for wrong in (
        {"valid_seconds": 86401},
        {"valid_seconds": 0},
        {"valid_seconds": float("nan")},
        {"decision": "maybe"},
        {"reason": "two\nlines"},
        {"reason": "x" * 257},
        {"jti": "a b"},
        {"vm_id": ""},
        {"event": nameless},
        {"kid": "k" * 500},
    ):
        with pytest.raises(SigningFailed):
            signed(private, **wrong)
    for path in (tmp_path / "rsa", tmp_path / "ops.pub", tmp_path / "missing"):
        with pytest.raises(SigningFailed, match=path.name):
            signed(path)


def test_pyjwt_with_default_settings_reads_the_token(tmp_path):
    pair = generate_key(tmp_path / "ops")
    text = signed(pair.private_key_file, now=datetime.now(timezone.utc))
    public = serialization.load_pem_public_key(pair.public_key_file.read_bytes())

    read = jwt.decode(text, public, algorithms=["EdDSA"], audience=VM_ID, issuer="portal")

    assert read["sub"] == EVENT.event_id
