"""Login with a certified OpenID Connect provider: `oidc-provider` (npm) with PKCE and refresh tokens.

The provider never issues a forged token. For forged tokens, see test_oidc.py.
"""

import re
from datetime import datetime, timezone
from urllib.parse import parse_qs, urlsplit

import pytest
from fleet_records import fleet_record
from oidc_provider import CertifiedProvider, ProviderBrowser
from oidc_stub import CLIENT
from page_kit import Office

from bridge.portal.users import COOKIE
from bridge.testing import ManualClock

ORIGIN = "https://portal.example.net"
GROUPS = [
    {"group": "ops", "role": "approver", "scope": ["labels.team:payments"]},
    {"group": "all", "role": "viewer"},
]
ANN = {"preferred_username": "ann", "groups": ["ops", "everyone"]}


class Logins:
    """A portal, its provider, and browsers."""

    def __init__(self, provider, office, clock):
        self.provider, self.office, self.clock = provider, office, clock
        self.at_provider = ProviderBrowser()

    def start(self, browser):
        """Return the URL of the login page at the provider. The browser keeps the cookie of the login."""
        answer = browser.get("/login/oidc?next=/audit")
        assert answer.status_code == 303, answer.text
        browser.headers["Cookie"] = answer.headers["Set-Cookie"].partition(";")[0]
        return answer.headers["Location"]

    def callback(self, browser, user):
        """Log in at the provider, and return the path of the callback."""
        url = ProviderBrowser().authorize(self.start(browser), user)
        return url.removeprefix(ORIGIN)

    def log_in(self, user="ann"):
        """Return a browser with a session."""
        browser = self.office.browser()
        done = browser.get(self.callback(browser, user))
        assert (done.status_code, done.headers.get("Location")) == (303, "/audit"), done.text
        browser.headers["Cookie"] = f"{COOKIE}={browser.cookie}"
        return browser

    def refusal(self, user):
        """Return the text of the page that refuses the login of *user*."""
        browser = self.office.browser()
        answer = browser.get(self.callback(browser, user))
        assert (answer.status_code, browser.cookie) == (403, None)
        return answer.text


def role_in(page):
    return re.search(r"\bann\W+(\w+)", page.text)[1]


@pytest.fixture
def logins(monkeypatch, tmp_path):
    monkeypatch.setenv("OIDC_SECRET", "secret of the client")
    bob = {"preferred_username": "bob", "groups": ["everyone"]}
    max_ = {"preferred_username": "max", "_claim_names": {"groups": "src1"}, "_claim_sources": {"src1": {}}}
    clock = ManualClock(datetime.now(timezone.utc))
    with CertifiedProvider(tmp_path, ann=ANN, bob=bob, max=max_) as provider:
        oidc = {"issuer": provider.issuer, "client_id": CLIENT, "client_secret_env": "OIDC_SECRET", "groups": GROUPS}
        with Office(tmp_path, people={"origin": ORIGIN, "oidc": oidc}, clock=clock.clock) as office:
            yield Logins(provider, office, clock)


def test_groups_determine_the_role_and_the_scope(logins):
    logins.office.portal.send(fleet_record(0, event_id="mine"), fleet_record(1, event_id="mine"))
    logins.office.portal.send(fleet_record(2, event_id="other", resources=("vm_2",), labels={"team": "search"}))
    page = logins.log_in().page("/")
    assert ("vm_0" in page.text, "vm_2" in page.text, role_in(page)) == (True, False, "approver")


def test_user_without_a_mapped_group_or_with_group_overage_is_rejected(logins):
    assert "None of your groups has a role" in logins.refusal("bob")
    assert "too many groups" in logins.refusal("max")


def test_changed_state_other_browser_and_reused_code_start_no_session(logins):
    browser = logins.office.browser()
    back = logins.callback(browser, "ann")
    state = parse_qs(urlsplit(back).query)["state"][0]
    assert browser.get(back.replace(state, state[:-1] + "~")).status_code == 403
    other = logins.office.browser()
    logins.start(other)
    assert other.get(back).status_code == 403
    own = logins.callback(other, "ann")
    foreign_code = parse_qs(urlsplit(own).query)["code"][0]
    code = parse_qs(urlsplit(back).query)["code"][0]
    # The PKCE verifier of this browser does not match the code of the other login.
    assert browser.get(back.replace(code, foreign_code)).status_code == 403
    assert browser.cookie is None
    back = logins.callback(browser, "ann")
    assert browser.get(back).status_code == 303
    session, browser.cookie = browser.cookie, None
    assert session
    assert (browser.get(back).status_code, browser.cookie) == (403, None)


def test_refresh_updates_the_role_and_a_failed_refresh_leaves_a_viewer(logins):
    browser = logins.log_in()
    logins.provider.change(ann={**ANN, "groups": ["all"]})
    assert role_in(browser.page("/")) == "approver"
    logins.clock.advance(15 * 60)
    assert role_in(browser.page("/")) == "viewer"
    logins.provider.change(ann=ANN)
    logins.clock.advance(15 * 60)
    assert role_in(browser.page("/")) == "approver"
    logins.provider.change()  # the provider refuses the refresh token of a deleted user
    logins.clock.advance(15 * 60)
    assert role_in(browser.page("/")) == "viewer"


def test_logout_ends_the_session_of_the_portal_and_of_the_provider(logins):
    browser, at_provider = logins.office.browser(), ProviderBrowser()
    back = at_provider.authorize(logins.start(browser), "ann")
    assert browser.get(back.removeprefix(ORIGIN)).status_code == 303
    browser.headers["Cookie"] = f"{COOKIE}={browser.cookie}"
    assert at_provider.authorize(logins.start(logins.office.browser())) != ""
    form, pressed = browser.page("/").form_with("Sign out")
    out = browser.post(form.action, [*form.single, *pressed], origin=ORIGIN)
    url = f"{logins.provider.issuer}/session/end?client_id={CLIENT}"
    assert url in out.text
    assert browser.get("/").status_code == 303
    at_provider.log_out(url)
    assert at_provider.authorize(logins.start(logins.office.browser())) == ""
