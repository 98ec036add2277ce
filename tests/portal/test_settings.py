"""The configuration file of the portal: all errors at once, no secrets in errors, and no accidental access."""

import sys

import doc_pages
import pytest

from bridge.config import loader
from bridge.errors import ConfigurationError
from bridge.portal.settings import load, read

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

AGENTS = {"agents": {"token_file": "/run/agents"}}


def mistakes_of(table):
    with pytest.raises(ConfigurationError) as caught:
        read(table)
    return caught.value.mistakes


def test_configuration_without_agent_authentication_is_rejected():
    assert "agents is missing" in mistakes_of({})[0]
    assert "No agent can authenticate" in mistakes_of({"agents": {}})[0]


def test_all_mistakes_are_reported_at_once():
    found = mistakes_of(
        {
            "server": {"listen": "portal.example.net:8443", "cert_file": "a"},
            "operator": {"lisen": "127.0.0.1:1"},
            "agents": {"token": "s3cret", "token_file": "a", "token_env": "b"},
        }
    )
    text = "\n".join(found)
    for part in (
        "server.listen is",
        "cert_file and key_file belong together",
        "Unknown key `operator.lisen`. Did you mean 'listen'?",
        "Unknown key `agents.token`.",
        "token_file and agents.token_env are both set",
    ):
        assert part in text
    assert "s3cret" not in text


@pytest.mark.parametrize(
    ("table", "found"),
    [
        ({"limits": {"open_events": 0}}, ["limits.open_events is 0", "[[notify]] needs people.origin"]),
        ({"people": {"idle_minutes": 0}}, ["people.idle_minutes is 0"]),  # no value of `origin` to check
        ({"people": {"idle_minutes": 0, "proxy_header": "X-User"}}, ["people.idle_minutes", "proxy_header needs"]),
    ],
)
def test_keys_are_checked_in_combination_even_if_another_key_is_invalid(table, found):
    mistakes = mistakes_of({**AGENTS, "notify": [{"name": "ops", "url": "https://example.net/hook"}], **table})
    assert len(mistakes) == len(found)
    assert all(part in mistake for part, mistake in zip(found, mistakes, strict=True))


@pytest.mark.parametrize("table", [{"cert_file": "a"}, {"key_file": "a"}])
def test_cert_file_and_key_file_are_only_valid_together(table):
    assert "cert_file and key_file belong together" in mistakes_of({"server": table, **AGENTS})[0]


URL = "postgresql://portal@db.example.net/portal?sslmode=verify-full"


def test_postgresql_is_configured_by_url_and_a_separate_password():
    settings = read({"database": {"url": URL, "password_file": "/run/password"}, **AGENTS})
    assert settings.database.url == URL
    assert settings.database.password().is_set
    assert not read({"database": {"url": URL}, **AGENTS}).database.password().is_set


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"url": URL, "file": "portal.db"}, "file and url are both set"),
        (
            {"url": URL, "password_file": "a", "password_env": "b"},
            "password_file and database.password_env are both set",
        ),
        ({"password_file": "a"}, "A password is set without url"),
        ({"url": "mysql://db/portal"}, "must begin with postgresql://"),
        ({"url": "host=db password=s3cret"}, "must begin with postgresql://"),
        ({"url": "postgresql://portal:s3cret@db/portal"}, "url contains a password"),
        ({"url": "postgresql://portal:s3cret#1@db/portal"}, "url"),
        ({"url": "postgresql://db/portal?user=portal&password=s3cret"}, "url contains a password"),
        ({"url": "postgresql://db/portal?sslpassword=s3cret"}, "url contains a password"),
        ({"url": "postgresql://[s3cret/portal"}, "url is not a valid URL"),
    ],
)
def test_database_mistakes_are_reported_without_the_password(table, words):
    text = "\n".join(mistakes_of({"database": table, **AGENTS}))
    assert words in text
    assert "s3cret" not in text


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"[agents", "is not valid TOML"), (b"\xff", "is not UTF-8 text"), (None, "cannot be read")],
)
def test_unreadable_file_is_named(tmp_path, content, message):
    path = tmp_path / "portal.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_documented_configurations_are_valid():
    names = ("howto/portal", "howto/portal-people", "operate/portal-postgresql")
    page = "\n".join(doc_pages.page(f"docs/{name}.md") for name in names)
    portal = read(tomllib.loads(doc_pages.marked(page, "file: portal.toml")))
    assert portal.readers.token().is_set
    database = read(tomllib.loads(doc_pages.marked(page, "postgresql: configuration"))).database
    assert database.url is not None
    assert database.password().is_set
    table = tomllib.loads(doc_pages.marked(page, "inventory: configuration"))
    assert read({**table, "agents": {"token_env": "TOKEN"}}).inventory.file is not None
    [sink] = loader.read(tomllib.loads(doc_pages.marked(page, "file: agent.toml"))).sinks
    assert (sink.type_name, sink.config.scope) == ("webhook", "all")


ATTESTED = {"subscriptions": ["8d10da13-8125-4ba9-a717-bf7490507b3d"], "secret_file": "/run/secret"}


@pytest.mark.parametrize("origin", ["https://portal.example.net/", "portal.example.net", "https://h/path"])
def test_origin_with_a_path_or_without_a_scheme_is_rejected(origin):
    assert "people.origin is" in mistakes_of({**AGENTS, "people": {"origin": origin}})[0]


def test_attested_agents_need_no_other_authentication():
    settings = read({"agents": {"attested": ATTESTED}}).agents.attested
    assert (settings.nonce, settings.roots_file) == ("required", None)
    assert settings.secret().is_set


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"subscriptions": []}, "a list that is not empty"),
        ({"subscriptions": ["all"]}, "agents.attested.subscriptions[0] is 'all', but must be the id of a subscription"),
        ({"secret_file": None}, "Set either secret_file or secret_env"),
        ({"secret_env": "X"}, "Set either secret_file or secret_env"),
        ({"nonce": "never"}, "'preferred' or 'required'"),
        ({"intermediates_urls": ["https://www.microsoft.com"]}, "an address with a path"),
        ({"intermediates_urls": ["www.microsoft.com/pki"]}, "an address with a path"),
        ({"intermediates_urls": ["https://x/y?z"]}, "an address with a path"),
    ],
)
def test_invalid_attested_settings_are_reported(changes, words):
    table = {key: value for key, value in {**ATTESTED, **changes}.items() if value is not None}
    assert words in "\n".join(mistakes_of({"agents": {"attested": table}}))
