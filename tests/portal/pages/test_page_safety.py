"""Security of the pages: script injection, CSRF, sessions, redirects, and invalid forms."""

import pytest
from fleet_records import fleet_record
from page_kit import ABLE, PASSWORD, Page

from bridge.portal.fleet import key_of_event_id

A = key_of_event_id("A")
EVIL = "</p><script>alert(1)</script><img src=x onerror=alert(2)>\x07\u202e'\"{{7*7}}"
PAGES = ("/", f"/events/{A}", "/timeline", "/agents", "/audit", f"/decide?verdict=hold&event={A}")


def test_every_response_has_restrictive_security_headers(office):
    ann = office.browser("ann")
    answers = [ann.get(path) for path in (*PAGES, "/login", "/events/nothing", "/static/portal.js")]
    answers += [office.browser().get("/"), ann.post("/decide", {"csrf": "x"})]
    for answer in answers:
        policy = answer.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        for part in ("form-action 'self'", "base-uri 'none'", "frame-ancestors 'none'"):
            assert part in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Referrer-Policy"] == "same-origin"
        assert answer.headers["X-Frame-Options"] == "DENY"


def test_pages_contain_no_inline_script_or_style(office):
    ann = office.browser("ann")
    for path in (*PAGES, "/login"):
        page = ann.page(path)
        for tag, found in page.tags:
            assert tag != "style"
            assert "style" not in found
            assert not any(name.startswith("on") for name in found)
            if tag == "script":
                assert (found["src"] or "").startswith("/static/")
            for name in ("src", "href", "action"):
                assert (found.get(name) or "/").startswith(("/", "#"))


def test_text_from_azure_and_users_is_escaped(office):
    office.portal.send(
        fleet_record(
            0,
            sequence=2,
            event_id="E",
            event_type=EVIL,
            resources=(EVIL, "vm_0"),
            description=EVIL,
            event_source=EVIL,
            labels={"team": EVIL},
            not_before_raw=EVIL,
        )
    )
    ann = office.browser("ann")
    key = key_of_event_id("E")
    assert ann.submit(f"/events/{key}", "hold", reason=EVIL).status_code == 303
    for path in (*PAGES, f"/events/{key}", f"/decide?verdict=hold&event={key}"):
        html = ann.page(path).html
        assert "<script>" not in html
        assert "<img" not in html
        assert "\x07" not in html
        assert "\u202e" not in html
    shown = ann.page(f"/events/{key}").text
    assert "<script>alert(1)</script>" in shown
    assert "\\x07\\u202e" in shown
    assert "{{7*7}}" in shown


def test_form_from_another_site_or_session_is_rejected(office):
    ann, bob = office.browser("ann"), office.browser("bob")
    form, pressed = ann.page(f"/events/{A}").form_with("approve")
    for fields, origin in (
        (form.fields, "https://evil.example"),
        (form.fields, f"{office.origin}.evil.example"),
        (form.fields, "null"),
        (form.fields, None),
        ([field for field in form.fields if field[0] != "csrf"], "own"),
        ([*form.fields, ("csrf", "x")], "own"),
        ([("csrf", dict(bob.page("/").forms[0].fields)["csrf"]), *form.fields[1:]], "own"),
        ([("csrf", "\u00e4"), *form.fields[1:]], "own"),
    ):
        assert ann.post("/decide", [*fields, *pressed], origin=origin).status_code == 403
    assert ann.post("/logout", {"csrf": "x"}).status_code == 403
    assert office.poll(0, **ABLE)["decisions"] == []


def test_login_from_another_site_is_rejected(office):
    answer = office.browser().post("/login", {"name": "ann", "password": PASSWORD}, origin="https://evil.example")
    assert answer.status_code == 403
    assert "Set-Cookie" not in answer.headers


def test_session_cookie_has_the_host_prefix_and_is_http_only(office):
    answer = office.browser().sign_in("ann")
    cookie = answer.headers["Set-Cookie"]
    assert cookie.startswith("__Host-scheduled-events-portal=")
    for part in ("HttpOnly", "Path=/", "SameSite=lax", "Secure"):
        assert part in cookie
    assert "Domain" not in cookie


def test_logout_invalidates_the_session_cookie(office):
    ann = office.browser("ann")
    cookie = ann.cookie
    answer = ann.submit("/", "Sign out")
    assert (answer.status_code, answer.headers["Location"]) == (303, "/login")
    assert ann.cookie is None
    ann.cookie = cookie
    assert ann.get("/").status_code == 303


def test_anonymous_user_is_redirected_to_the_login_page_and_back(office):
    stranger = office.browser()
    answer = stranger.get(f"/events/{A}")
    assert answer.status_code == 303
    form, pressed = Page(stranger.get(answer.headers["Location"]).text).form_with("Sign in")
    fields = {**dict(form.fields), "name": "ann", "password": PASSWORD}
    assert stranger.post("/login", [*fields.items(), *pressed]).headers["Location"] == f"/events/{A}"


@pytest.mark.parametrize(
    "wanted", ["//evil.example", "https://evil.example", "/\\evil.example", "/events/../x", "/live"]
)
def test_login_redirects_only_to_pages_of_the_portal(office, wanted):
    assert office.browser().sign_in("ann", next=wanted).headers["Location"] == "/"
    assert "evil" not in office.browser().get("/login", params={"next": wanted}).text


def test_wrong_password_does_not_reveal_whether_the_user_exists(office):
    answers = [office.browser().sign_in(name, "wrong") for name in ("ann", "nobody-here")]
    assert [answer.status_code for answer in answers] == [401, 401]
    assert len({Page(answer.text).text for answer in answers}) == 1


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"x" * (1024 * 1024 + 1), "application/x-www-form-urlencoded", 413),
        (b"a=%ff", "application/x-www-form-urlencoded", 400),
        (b"a=\xff", "application/x-www-form-urlencoded", 400),
        (b"&".join([b"a=b"] * 2000), "application/x-www-form-urlencoded", 400),
        (b"{}", "application/json", 400),
        (b"csrf=x", "text/plain", 400),
    ],
)
def test_body_that_is_not_a_form_is_rejected(office, body, kind, status):
    ann = office.browser("ann")
    ann.headers["Content-Type"] = kind
    assert ann.post("/decide", body).status_code == status
    assert ann.post("/login", body).status_code == status


@pytest.mark.parametrize(
    "fields",
    [
        [("verdict", "approve")],
        [("verdict", "deny"), ("event", f"{A}:{'0' * 64}")],
        [("verdict", "hold"), ("event", "x")],
        [("verdict", "hold"), ("event", f"{A}:{'0' * 63}")],
        [("verdict", "approve"), ("event", " ".join(f"{number:032}:{'0' * 64}" for number in range(21)))],
        [("verdict", "hold"), ("event", " ".join(f"{number:032}:{'0' * 64}" for number in range(1001)))],
        [("verdict", "hold"), ("verdict", "approve"), ("event", f"{A}:{'0' * 64}")],
    ],
)
def test_invalid_form_is_rejected(office, fields):
    ann = office.browser("ann")
    csrf = dict(ann.page("/").forms[0].fields)["csrf"]
    assert ann.post("/decide", [("csrf", csrf), *fields]).status_code == 400


def test_unknown_event_is_rejected_as_not_reported(office):
    ann = office.browser("ann")
    csrf = dict(ann.page("/").forms[0].fields)["csrf"]
    answer = ann.post("/decide", {"csrf": csrf, "verdict": "hold", "event": f"{'0' * 32}:{'0' * 64}"})
    assert answer.status_code == 404
    assert "No record reports this event." in answer.text
    assert ann.post("/verdicts/nothing/withdraw", {"csrf": csrf}).status_code == 404
