"""The [approval] table: its defaults, and errors that must appear before an approval depends on the table."""

import sys

import pytest

from bridge.approval.signing import generate_key
from bridge.config.approval import KeySettings, RemoteSettings, RuleSettings
from bridge.config.loader import read
from bridge.config.trusted_keys import TrustedKey
from bridge.errors import ConfigurationError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    return [generate_key(folder / name).public_key_file for name in ("a.key", "b.key")]


def _approval(text):
    return read(tomllib.loads(text)).approval


def _mistakes(text):
    with pytest.raises(ConfigurationError) as caught:
        _approval(text)
    return caught.value.mistakes


def _rule(text="", name="r", action="approve"):
    return f'[[approval.rules]]\nname = "{name}"\naction = "{action}"\n{text}\n'


def _remote(text="", *, url="https://portal.example.net/api/v1", key_tables=""):
    return f'[approval.remote]\nurl = "{url}"\n{text}\n{key_tables}'


def _key(path, kid="ops-2026", approver="portal"):
    return f'[[approval.remote.keys]]\nkid = "{kid}"\napprover = "{approver}"\npublic_key_file = \'{path}\'\n'


def test_every_key_of_a_rule_is_read():
    (rule,) = _approval(
        _rule(
            'event_types = ["Freeze", "FutureType"]\nevent_sources = ["Platform"]\nmin_duration_seconds = 0\n'
            'max_duration_seconds = 8\nresources = "only_me"\nact = "each"\ncommand = ["/bin/drain", "-n"]\n'
            "command_timeout_seconds = 60\ncommand_covers_all = true"
        )
    ).rules
    assert rule == RuleSettings(
        name="r",
        action="approve",
        event_types=("Freeze", "FutureType"),
        event_sources=("Platform",),
        min_duration_seconds=0,
        max_duration_seconds=8,
        resources="only_me",
        act="each",
        command=("/bin/drain", "-n"),
        command_timeout_seconds=60,
        command_covers_all=True,
    )


def test_portal_is_read_with_its_keys(keys):
    remote = _approval(_remote('token_file = "/run/credentials/portal"', key_tables=_key(keys[0]))).remote
    assert remote == RemoteSettings(
        url="https://portal.example.net/api/v1",
        token_file="/run/credentials/portal",
        keys=(KeySettings(kid="ops-2026", approver="portal", public_key_file=str(keys[0])),),
    )
    assert (remote.wait_seconds, remote.required_approvals) == (30, 1)
    [trusted] = remote.trusted_keys()
    assert isinstance(trusted, TrustedKey)
    assert trusted.load().sha256


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("approval = 3", "approval is 3, but must be one table."),
        ("[approval]\ndryrun = true", "Did you mean 'dry_run'?"),
        ("[approval]\nleader_fallback_seconds = 0", "must be a number above 0"),
        ("[approval.rules]\nname = 'x'", "approval.rules is a table, but must be a list"),
        (_rule(name=""), "approval.rules[0].name is '', but must be 1 to 64 characters"),
        (_rule(action="aprove"), "Did you mean 'approve'?"),
        ("[[approval.rules]]\nname = 'x'", "approval.rules[0].action is missing."),
        (_rule() + _rule(name="s") + _rule(), "approval.rules: The name 'r' occurs 2 times."),
        (_rule("event_types = []"), "approval.rules[0].event_types is an empty list"),
        (_rule('event_types = ["freeze"]'), "must be 'Freeze', which is Azure's spelling."),
        (_rule("max_duration_seconds = -1"), "must be a number at least 0"),
        (_rule("min_duration_seconds = 9\nmax_duration_seconds = 8"), "no event matches."),
        (_rule('resources = "me"'), "must be 'any' or 'includes_me' or 'only_me'"),
        (_rule("command = []"), "approval.rules[0].command is an empty list"),
        (_rule('command = "drain"'), "approval.rules[0].command is 'drain', but must be a list"),
        (_rule('command = ["bin/drain"]'), "must be a program with its absolute path"),
    ],
)
def test_error_in_a_rule_is_reported(text, sentence):
    [said] = _mistakes(text)
    assert sentence in said


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('token_file = "a"\ntoken_env = "B"', "token_file and token_env are both set. Keep the one"),
        ('entra_scope = "api://x"\nclient_cert_file = "CERT"', "entra_scope and client_cert_file are both set"),
        ('credential = "attested"\ntoken_file = "a"', "token_file and credential are both set"),
        ('credential = "attest"', "but must be 'attested'"),
        ('client_key_file = "CERT"', "client_key_file requires client_cert_file."),
        ('ca_file = "/nowhere/ca.pem"', "approval.remote.ca_file: The file /nowhere/ca.pem does not exist."),
        ('entra_scope = "two scopes"', "but must be one scope"),
        ('token = "hunter2"', "Did you mean token_file or token_env?"),
        ("wait_seconds = 0", "approval.remote.wait_seconds is 0, but must be a whole number at least 1"),
        ("required_approvals = 2", "the keys belong to 1 approver, so nothing would ever be approved."),
        ('command = ["bin/drain"]', "must be a program with its absolute path"),
        ("command_timeout_seconds = 86401", "must be a number above 0 and at most 86400"),
    ],
)
def test_error_in_the_portal_table_is_reported(text, sentence, keys):
    [said] = _mistakes(_remote(text.replace("CERT", str(keys[0])), key_tables=_key(keys[0])))
    assert sentence in said
    assert "hunter2" not in said


@pytest.mark.parametrize(
    "url",
    [
        "http://portal.example.net",
        "http://localhost.example.net",
        "ftp://portal.example.net",
        "https://user:hunter2@portal.example.net",
        "https://portal.example.net/?token=hunter2",
        "https://portal.example.net/#x",
        "https://portal.example.net/a b",
        "https://portal.example.net:0",
        "https://[portal",
    ],
)
def test_url_without_https_or_with_invalid_parts_is_rejected(url, keys):
    [said] = _mistakes(_remote(url=url, key_tables=_key(keys[0])))
    assert said.startswith("approval.remote.url is ")
    assert "hunter2" not in said


@pytest.mark.parametrize("host", ["localhost:8443", "[::1]:8080"])
def test_plain_http_is_allowed_to_loopback(host, keys):
    assert _approval(_remote(url=f"http://{host}/api", key_tables=_key(keys[0]))).remote.url == f"http://{host}/api"


def test_portal_without_keys_is_rejected():
    assert "keys is missing" in _mistakes(_remote())[0]
    assert "`scheduled-events-bridge keygen` creates a key pair" in _mistakes(_remote("keys = []"))[0]


def test_two_keys_of_an_approver_count_as_one_approver(keys):
    of_one = _key(keys[0]) + _key(keys[1], kid="ops-2027")
    of_two = _key(keys[0]) + _key(keys[1], kid="ops-2027", approver="night shift")
    assert "to 1 approver," in _mistakes(_remote("required_approvals = 2", key_tables=of_one))[0]
    assert _approval(_remote("required_approvals = 2", key_tables=of_two)).remote.required_approvals == 2


def test_client_key_with_a_passphrase_is_rejected(keys, tmp_path):
    encrypted = tmp_path / "client.pem"
    encrypted.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\n-----END ENCRYPTED PRIVATE KEY-----\n")
    [said] = _mistakes(_remote(f"client_cert_file = '{encrypted}'", key_tables=_key(keys[0])))
    assert "is encrypted" in said
