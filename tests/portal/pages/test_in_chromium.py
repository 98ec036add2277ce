"""The pages in a browser: live updates for several users, the keyboard, accessibility, and the demo."""

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from browser_kit import JUST_CHANGED, WAIT_MS, Watched, chromium
from closing import closing_each
from fleet_records import fleet_record
from page_kit import ABLE

from bridge.events.record import Transition
from bridge.portal.fleet import key_of_event_id

A, B, E = (key_of_event_id(name) for name in "ABE")
VMS = ("web-0", "web-1", "web-2")
EVIL = "</p><script>document.title='evil'</script><img src=x onerror=\"document.title='evil'\">"


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def window(browser):
    with closing_each(partial(Watched, browser)) as open_at:
        yield open_at


def _say(row, text):
    row.get_by_text(text).first.wait_for(timeout=WAIT_MS)


def test_two_users_decide_an_event_and_see_each_change_without_a_reload(office, window):
    ann, bob, vic = (window(office.origin).sign_in(name) for name in ("ann", "bob", "vic"))
    for each in (ann, bob, vic):
        each.is_live()
        each.page.evaluate("window.notReloaded = true")
    office.portal.send(fleet_record(2, event_id="B", resources=("vm_2",)))
    for each in (ann, bob, vic):
        each.row(B).wait_for()
    assert vic.page.locator("main form button").all_inner_texts() == ["Filter"]
    for each in (ann, bob):
        each.go(f"/events/{A}")
        each.is_live()
        each.page.evaluate("window.notReloaded = true")
    bob.press(bob.event(), "hold", reason="the batch runs")
    _say(ann.event(), "Held by bob")
    _say(vic.row(A), "held by bob")
    bob.page.wait_for_timeout(1_000)
    bob.event().get_by_role("button", name=re.compile("Withdraw")).click()
    _say(ann.event(), "bob held it, withdrawn")
    ann.event().locator("button.approve").wait_for()
    ann.press(ann.event(), "approve", reason="now")
    _say(vic.row(A), "approved by ann")
    _say(bob.event(), "queued")
    told = office.poll(0, **ABLE)
    office.poll(0, index=told["index"], **ABLE)
    _say(bob.event(), "received")
    for sequence, (transition, state) in enumerate(
        ((Transition.STARTED, "started"), (Transition.COMPLETED, "completed")), start=2
    ):
        office.portal.send(*(fleet_record(vm, sequence=sequence, transition=transition, seconds=40) for vm in (0, 1)))
        ann.event().locator(".badge", has_text=state).wait_for()
        vic.page.locator("#below").locator(f"#event-{A}").get_by_text(state).first.wait_for()
    for each in (ann, bob, vic):
        assert each.page.evaluate("window.notReloaded") is True


def test_script_writes_countdowns_in_the_format_of_the_server(office, window):
    served = window(office.origin, java_script_enabled=False).sign_in("ann")
    live = window(office.origin).sign_in("ann")
    live.page.evaluate("document.querySelector('time.countdown').textContent = 'old'")
    live.page.locator("time.countdown", has_not_text="old").wait_for()

    for each in (served, live):
        assert re.fullmatch(r"1[34]m [0-5][0-9]s", each.page.locator("time.countdown").inner_text())


def test_update_keeps_the_selection_except_for_changed_events(office, window):
    office.portal.send(fleet_record(2, event_id="B", resources=("vm_2",)))
    ann = window(office.origin).sign_in("ann")
    ann.is_live()
    for key in (A, B):
        ann.row(key).locator("[type=checkbox]").check()
    ann.page.get_by_role("button", name="Hold 2…").wait_for()
    changed = {"sequence": 2, "seconds": 5, "event_type": "Reboot"}
    office.portal.send(fleet_record(0, **changed), fleet_record(1, **changed))
    _say(ann.row(A), "Reboot")
    assert not ann.row(A).locator("[type=checkbox]").is_checked()
    assert ann.row(B).locator("[type=checkbox]").is_checked()
    ann.page.get_by_role("button", name="Hold 1…").wait_for()


@pytest.fixture
def event_page(office, window):
    def open_for(name):
        person = window(office.origin).sign_in(name)
        person.go(f"/events/{A}")
        person.is_live()
        person.page.wait_for_timeout(2_500)
        return person

    return open_for


def test_accepted_decision_clears_the_reason_and_a_failed_one_keeps_it(event_page, office):
    ann, bob = (event_page(name) for name in ("ann", "bob"))
    for address in ("**/events/*?part=*", "**/decide"):  # Bob's page receives no updates and sends no requests
        bob.page.route(address, lambda route: route.abort())
    ann.press(ann.event(), "approve", reason="now")
    _say(ann.event(), "“now”")
    assert ann.event().locator("[name=reason]").input_value() == ""
    ann.press(ann.event(), "hold", reason="no")
    _say(ann.event(), "ann holds it")
    bob.press(bob.event(), "approve", reason="late")
    bob.page.wait_for_selector("#live:has-text('The portal did not receive it')")
    assert bob.event().locator("[name=reason]").input_value() == "late"
    bob.page.unroute("**/decide")
    bob.event().locator("button.approve").click()
    _say(bob.page, "Withdraw the hold to approve the event.")
    assert bob.page.url == f"{office.origin}/decide"


def test_click_right_after_a_change_is_ignored_with_a_message(event_page, office):
    ann = event_page("ann")
    ann.page.evaluate(
        """(button) => new MutationObserver((_, observer) => {
            observer.disconnect();
            document.querySelector(button).click();
        }).observe(document.querySelector("main"), { childList: true })""",
        "button.approve",
    )
    changed = {"sequence": 2, "seconds": 5, "event_type": "Reboot"}
    office.portal.send(fleet_record(0, **changed), fleet_record(1, **changed))
    ann.page.wait_for_selector(f"#live[data-state=away]:has-text('{JUST_CHANGED}')")
    ann.page.wait_for_selector("#live[data-state=live]")
    assert ann.event().locator("button.approve").is_visible()
    ann.press(ann.event(), "approve", reason="now")
    _say(ann.event(), "“now”")


def test_button_pressed_during_an_update_is_submitted(event_page, office):
    ann, bob = event_page("ann"), office.browser("bob")  # a second window while a button is down can block Chromium
    ann.event().locator("button.approve").hover()
    ann.page.mouse.down()
    assert bob.submit(f"/events/{A}", "hold", reason="no").status_code == 303
    ann.page.wait_for_timeout(2_500)
    assert not ann.event().get_by_text("Held by bob").is_visible()
    ann.page.mouse.up()
    _say(ann.page, "Withdraw the hold to approve the event.")


def test_page_reports_a_failed_update_and_retries(office, window):
    ann = window(office.origin).sign_in("ann")
    ann.is_live()
    ann.page.wait_for_timeout(2_500)
    ways = [lambda route: route.abort(), lambda route: route.fulfill(status=503, body="")]
    for event_id, in_the_way in zip("BE", ways, strict=True):
        key = key_of_event_id(event_id)
        ann.page.route("**/?part=*", in_the_way)
        office.portal.send(fleet_record(2, event_id=event_id, resources=("vm_2",)))
        ann.page.wait_for_selector("#live[data-state=away]:has-text('out of date: retrying')")
        assert ann.row(key).count() == 0
        ann.page.unroute("**/?part=*")
        ann.row(key).wait_for()
        ann.page.wait_for_selector("#live[data-state=live]")


def test_logout_in_another_tab_shows_the_login_page(office, window):
    ann = window(office.origin).sign_in("ann")
    ann.is_live()
    second = ann.context.new_page()
    second.goto(f"{office.origin}/agents")
    second.get_by_role("button", name="Sign out").click()
    ann.page.wait_for_selector("h1:has-text('Sign in')")


def test_pages_work_without_javascript(office, window):
    office.portal.send(fleet_record(2, event_id="B", resources=("vm_2",), event_type="Reboot"))
    office.poll(2, **ABLE)
    ann = window(office.origin, java_script_enabled=False).sign_in("ann")
    ann.page.select_option("[name=type]", "Reboot")
    ann.page.get_by_role("button", name="Filter").click()
    assert ann.row(A).count() == 0
    for verdict, text in (("hold", "held by ann"), ("approve", "approved by ann")):
        ann.row(B).locator("[type=checkbox]").check()
        ann.page.locator(f"button[value={verdict}]").click()
        ann.page.fill("[name=reason]", "without a script")
        ann.page.locator(f"button[value={verdict}]").click()
        _say(ann.page, "without a script")
        ann.go("/")
        _say(ann.row(B), text)
        if verdict == "hold":
            ann.row(B).get_by_role("link").click()
            ann.page.get_by_role("button", name=re.compile("Withdraw")).click()
            ann.go("/")
    assert "Reload to see changes" in ann.page.locator("#live").inner_html()
    office.portal.send(fleet_record(2, event_id="B", sequence=2, resources=("vm_2",), transition=Transition.STARTED))
    ann.page.reload()
    _say(ann.row(B), "Azure has started it")


def test_pages_work_with_the_keyboard_only(office, window):
    office.portal.send(fleet_record(2, event_id="B", resources=("vm_2",), event_type="Reboot"))
    office.poll(2, **ABLE)
    ann = window(office.origin).sign_in("ann")
    ann.is_live()
    keys = ann.page.keyboard
    keys.press("Tab")
    assert ann.page.evaluate("document.activeElement.className") == "skip"
    keys.press("/")
    keys.type("vm_2")
    keys.press("Enter")
    ann.page.wait_for_url("**/?q=vm_2*")
    assert ann.row(A).count() == 0
    keys.press("j")
    keys.press("h")
    ann.page.wait_for_url("**/decide?**")
    _to_the_reason(ann)
    keys.type("by keys")
    keys.press("Enter")
    _say(ann.page, "“by keys”")
    ann.go("/")
    ann.is_live()
    for key in ("j", "j", "k", "j", "a"):
        keys.press(key)
    ann.page.wait_for_url("**/decide?**")
    _to_the_reason(ann)
    keys.press("Tab")
    assert ann.page.evaluate("document.activeElement.value") == "approve"
    keys.press("Enter")
    _say(ann.page, "ann approved it")
    keys.press("?")
    ann.page.get_by_text("Keyboard shortcuts").wait_for()


def _to_the_reason(window):
    for _ in range(30):
        window.page.keyboard.press("Tab")
        if window.page.evaluate("document.activeElement.name") == "reason":
            return


def test_text_from_azure_executes_no_script(office, window):
    evil = fleet_record(0, sequence=2, event_id="E", resources=(EVIL,), event_type=EVIL, description=EVIL)
    office.portal.send(evil)
    ann = window(office.origin).sign_in("ann")
    ann.is_live()
    for path in ("/", f"/events/{E}", "/timeline", "/audit"):
        ann.go(path)
        ann.page.wait_for_timeout(300)
        assert ann.page.title() != "evil"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_reports_no_accessibility_violations(office, window, theme):
    script = _axe()
    office.browser("bob").submit(f"/events/{A}", "hold", reason="batch")
    office.portal.send(fleet_record(2, event_id="B", resources=("vm_2",)))
    office.poll(2, **ABLE)
    # The content security policy blocks the script of axe. All other tests use the policy.
    ann = window(office.origin, color_scheme=theme, bypass_csp=True).sign_in("ann")
    found = []
    paths = (
        "/",
        f"/events/{A}",
        "/timeline",
        "/agents",
        "/audit",
        f"/decide?verdict=hold&event={B}",
        "/events/none",
        "/login",
    )
    for path in paths:
        ann.go(path)
        ann.page.wait_for_timeout(300)
        ann.page.evaluate(script)
        for violation in ann.page.evaluate("axe.run()")["violations"]:
            nodes = [node["html"][:200] for node in violation["nodes"]]
            found.append((path, violation["impact"], violation["id"], nodes))
    assert found == []


def _axe():
    path = os.environ.get("AXE_CORE")
    if path is None:
        pytest.skip("AXE_CORE does not name axe.min.js of the npm package axe-core")
    return Path(path).read_text(encoding="utf-8")


@pytest.fixture
def demo(agent_env, tmp_path):
    """The process of `demo --portal`, its URL, the password, and the start time."""
    began = time.monotonic()
    environment = {**agent_env, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "bridge", "demo", "--portal"], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        printed = ""
        while "Ctrl-C" not in printed:
            line = process.stdout.readline()
            assert line, f"the demo ended: {printed}"
            printed += line
        yield process, re.search(r"http://\S+", printed)[0], re.search(r"password (\S+),", printed)[1], began
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_three_agents_follow_an_approval_in_the_demo(demo, window, tmp_path):
    process, origin, password, began = demo
    ann = window(origin).sign_in("ann", password)
    ann.page.get_by_role("link", name=re.compile("Freeze")).first.click()
    row = ann.event()
    row.locator("button.approve").wait_for()
    assert time.monotonic() - began < 60  # from the start to a page with an event to approve
    ann.is_live()
    ann.page.evaluate("window.notReloaded = true")
    assert row.locator("button.approve span").inner_text() == f"starts the event now, for these 3 VMs: {', '.join(VMS)}"
    ann.press(row, "approve", reason="quiet")
    row.locator(".badge", has_text="started").wait_for()
    _say(row, "followed")
    row.locator(".badge", has_text="completed").wait_for()
    assert ann.page.evaluate("window.notReloaded") is True
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert list(tmp_path.glob("scheduled-events-bridge-demo-*")) == []
