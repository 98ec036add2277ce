"""Login through OpenID Connect: forged tokens and foreign logins never start a session."""

import asyncio
import base64
import json
import time
from urllib.parse import parse_qs, urlsplit

import doc_pages
import pytest
import tomllib
from joserfc import jwt
from joserfc.jwk import OctKey
from oidc_stub import CLIENT, OidcStub
from page_kit import Office
from portal_users import person_of

from bridge.clock import REAL_CLOCK, format_time
from bridge.portal.oidc import LoginRefused
from bridge.portal.settings import read
from bridge.portal.store.database import StoreThreads
from bridge.portal.store.users import put_user, user_of
from bridge.portal.users import AccessDenied, Users, new_session_id
from bridge.testing import ManualClock


@pytest.fixture
def provider(monkeypatch):
    monkeypatch.setenv("OIDC_SECRET", "secret of the client")
    provider = OidcStub()
    yield provider
    provider.close()


class Login:
    """Two processes of a portal on one database, and a browser."""

    def __init__(self, provider, database):
        self.provider, self.store = provider, database.store()
        self.clock = ManualClock()
        self.clock.advance(time.time() - self.clock.clock.timestamp())
        people = {
            "origin": "https://portal.example.net",
            "oidc": provider.settings(),
            "local_login_from": ["10.1.0.0/16"],
        }
        self.settings = read({"agents": {"token_env": "X"}, "people": people}).people

    def run(self, work):
        async def main():
            threads = StoreThreads(self.store)
            pair = [Users(self.settings, store=threads, clock=self.clock.clock) for _ in range(2)]
            for each in pair:
                await each.load()
            try:
                return await work(*pair)
            finally:
                for each in pair:
                    each.oidc.close()
                threads.close()

        return asyncio.run(main())

    async def begin(self, users):
        """Return the secret of the browser's cookie, and the state."""
        secret = new_session_id()
        query = parse_qs(urlsplit(await users.oidc.authorization_url(secret)).query)
        assert query["code_challenge_method"] == ["S256"]
        self.provider.nonce = query["nonce"][0]
        return secret, query["state"][0]

    async def finish(self, users, secret, state, code="code-1"):
        session = new_session_id()
        user, columns = await users.oidc.finish(secret, state=state, code=code, session_id=session)
        return await users.begin_session(user, old_session_id="", session_id=session, **columns)

    def refusal(self):
        async def work(users, _):
            with pytest.raises(LoginRefused) as refused:
                await self.finish(users, *await self.begin(users))
            return str(refused.value)

        return self.run(work)


@pytest.fixture
def login(provider, database):
    return Login(provider, database)


def test_login_across_two_processes_starts_a_session_in_both(login):
    async def work(first, second):
        session = await login.finish(second, *await login.begin(first))
        person = await person_of(first, session)
        assert (person.key, person.name, person.roles) == (f"{login.provider.issuer} 4711", "ann", "approver")
        assert person.scope == ("labels.team:payments",)
        await first.sign_out(person)
        with pytest.raises(AccessDenied):
            await person_of(second, session)

    login.run(work)
    assert login.provider.forms[0]["code_verifier"]


def test_es256_is_accepted(login):
    login.provider.signs_with, login.provider.header = login.provider.ec, {"alg": "ES256", "kid": "k2"}
    assert login.run(lambda users, _: begin_and_finish(login, users))


async def begin_and_finish(login, users):
    return await login.finish(users, *await login.begin(users))


@pytest.mark.parametrize(
    "claims",
    [
        {"nonce": "another"},
        {"nonce": None},
        {"aud": "another"},
        {"aud": [CLIENT, "another"]},
        {"aud": None},
        {"azp": "another"},
        {"iss": "https://login.example.net"},
        {"iss": None},
        {"exp": 1_000_000_000},
        {"exp": None},
        {"iat": None},
        {"sub": None},
        {"sub": ""},
        {"sub": 7},
        {"groups": None},
        {"groups": ["unknown"]},
        {"groups": "ops"},
        {"groups": None, "_claim_names": {"groups": "src1"}},
        {"hasgroups": True},
    ],
    ids=str,
)
def test_id_token_with_a_wrong_claim_starts_no_session(login, claims):
    login.provider.claims = claims
    assert login.refusal()


def test_issuer_must_match_exactly(login):
    login.provider.claims = {"iss": f"{login.provider.issuer}/"}
    assert login.refusal()
    login.provider.claims, login.provider.published_issuer = {}, f"{login.provider.issuer}/"
    assert "issuer" in login.refusal()


@pytest.mark.parametrize("forgery", ["stranger", "none", "hmac", "signature", "empty", "RS512"])
def test_forged_id_token_starts_no_session(login, forgery):
    provider = login.provider

    async def work(users, _):
        secret, state = await login.begin(users)
        header, payload, seal = provider.id_token().split(".")
        if forgery == "stranger":
            provider.signs_with = provider.stranger
        elif forgery == "none":
            none = base64.urlsafe_b64encode(json.dumps({"alg": "none"}).encode()).rstrip(b"=").decode()
            provider.token = f"{none}.{payload}."
        elif forgery == "hmac":
            claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
            public = provider.key.as_pem(private=False)
            provider.token = jwt.encode({"alg": "HS256"}, claims, OctKey.import_key(public.hex()))
        elif forgery == "signature":
            provider.token = f"{header}.{payload}.{seal[:-8]}AAAAAAAA"
        elif forgery == "empty":
            provider.token = "."
        else:
            provider.header = {"alg": "RS512", "kid": "k1"}
        with pytest.raises(LoginRefused):
            await login.finish(users, secret, state)

    login.run(work)


def test_replayed_token_changed_state_and_reused_code_start_no_session(login):
    async def work(users, _):
        secret, state = await login.begin(users)
        old = login.provider.id_token()
        for wrong in ("", state[:-1], "x" * 43):
            with pytest.raises(LoginRefused, match="another browser"):
                await login.finish(users, secret, wrong)
        with pytest.raises(LoginRefused, match="another browser"):
            await login.finish(users, new_session_id(), state)
        await login.finish(users, secret, state)
        with pytest.raises(LoginRefused, match="refused the login"):
            await login.finish(users, secret, state)
        secret, state = await login.begin(users)
        login.provider.token = old
        with pytest.raises(LoginRefused, match="invalid"):
            await login.finish(users, secret, state, "code-2")

    login.run(work)


def test_groups_are_refreshed_after_15_minutes_and_a_failure_leaves_a_viewer(login):
    async def work(first, second):
        session = await begin_and_finish(login, first)

        async def roles(users=second):
            login.clock.advance(61)
            return (await person_of(users, session)).roles

        login.provider.claims = {"exp": 2**40, "nonce": None}
        login.clock.advance(15 * 60)
        login.provider.is_down = True
        assert await roles() == "viewer"
        login.provider.is_down = False
        assert await roles() == "approver"
        login.provider.groups = ["all"]
        login.clock.advance(15 * 60)
        assert await roles(first) == "viewer"
        assert [each["refresh_token"] for each in login.provider.forms[1:]] == ["r", "r"]
        login.provider.groups = []
        login.clock.advance(15 * 60)
        with pytest.raises(AccessDenied):
            await roles()

    login.run(work)


def test_disabled_user_cannot_log_in_and_local_users_need_a_listed_address(login):
    async def work(users, _):
        await begin_and_finish(login, users)
        user = login.store.read(user_of, f"{login.provider.issuer} 4711")
        values = {name: getattr(user, name) for name in user.__struct_fields__}
        login.store.write(put_user, type(user)(**{**values, "disabled_at": format_time(login.clock.clock.now())}))
        secret, state = await login.begin(users)
        with pytest.raises(LoginRefused, match="disabled"):
            await login.finish(users, secret, state, "code-2")
        assert [users.allows_passwords(each) for each in ("10.1.2.3", "10.2.0.1")] == [True, False]
        with pytest.raises(AccessDenied, match="from this address"):
            await users.sign_in("ann", "x", address="10.2.0.1", old_session_id="")

    login.run(work)


def test_documented_configuration_is_valid():
    text = doc_pages.marked(doc_pages.page("docs/operate/portal-login.md"), "login: configuration")
    people = read({"agents": {"token_env": "X"}, **tomllib.loads(text)}).people
    assert [grant.role.value for grant in people.oidc.grants(["ops", "everyone", "other"])] == ["approver", "viewer"]


def test_browser_logs_in_and_out_over_http(provider, tmp_path):
    people = {"origin": "https://portal.example.net", "oidc": provider.settings()}
    with Office(tmp_path, people=people, clock=REAL_CLOCK) as office:
        browser = office.browser()
        page = browser.get("/login?next=/audit").text
        assert ("/login/oidc?next=/audit" in page, "password" in page) == (True, False)
        start = browser.get("/login/oidc?next=/audit")
        assert start.status_code == 303, start.text
        query = parse_qs(urlsplit(start.headers["Location"]).query)
        assert query["redirect_uri"] == ["https://portal.example.net/login/callback"]
        provider.nonce, cookie = query["nonce"][0], start.headers["Set-Cookie"].partition(";")[0]
        back = f"/login/callback?code=code-1&state={query['state'][0]}"
        refused = browser.get(back)
        assert (refused.status_code, browser.cookie) == (403, None)
        browser.headers["Cookie"] = cookie
        done = browser.get(back)
        assert (done.status_code, done.headers["Location"]) == (303, "/audit")
        form, pressed = browser.page("/audit").form_with("Sign out")
        out = browser.post(form.action, [*form.single, *pressed], origin="https://portal.example.net")
        assert f"{provider.issuer}/end?client_id=portal" in out.text
        assert browser.cookie is None
        assert browser.get(back).status_code == 403
