"""The pages in a browser: an event is watched from its announcement to its end without a reload, by several people."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from browser_kit import JUST_CHANGED, WAIT_MS, Watched, chromium
from fleet_records import fleet_record
from page_kit import Office

from bridge.events.record import Transition
from bridge.portal.fleet import key_of_event_id

A, B, E = (key_of_event_id(name) for name in "ABE")
ABLE = {"version": "9.9", "kids": ["p1"]}
VMS = ("web-0", "web-1", "web-2")
EVIL = "</p><script>document.title='evil'</script><img src=x onerror=\"document.title='evil'\">"


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def office(tmp_path):
    with Office(tmp_path) as office:
        office.portal.send(fleet_record(0), fleet_record(1))
        office.poll(0, **ABLE)
        yield office


@pytest.fixture
def window(browser):
    opened = []

    def open_at(origin, **options):
        opened.append(Watched(browser, origin, **options))
        return opened[-1]

    yield open_at
    for each in opened:
        each.close()


def _say(row, text):
    row.get_by_text(text).first.wait_for(timeout=WAIT_MS)


def test_event_is_decided_by_two_people_and_followed_without_a_reload(office, window):
    ann, bob, vic = (window(office.origin).sign_in(name) for name in ("ann", "bob", "vic"))
    for each in (ann, bob, vic):
        each.is_live()
        each.page.evaluate("window.notReloaded = true")
    office.portal.send(fleet_record(2, event_id="B", resources=("vm_2",)))
    for each in (ann, bob, vic):
        each.row(B).wait_for()
    assert vic.page.locator("main form button").all_inner_texts() == ["Show"]
    bob.press(bob.row(A), "hold", reason="the batch runs")
    _say(ann.row(A), "Held by bob")
    _say(vic.row(A), "the batch runs")
    bob.page.wait_for_timeout(1_000)
    bob.row(A).get_by_role("button", name=re.compile("Withdraw")).click()
    _say(ann.row(A), "bob held it, withdrawn")
    ann.row(A).locator("button.approve").wait_for()
    ann.press(ann.row(A), "approve", reason="now")
    _say(vic.row(A), "queued")
    told = office.poll(0, **ABLE)
    office.poll(0, index=told["index"], **ABLE)
    _say(vic.row(A), "received")
    for sequence, (transition, state) in enumerate(
        ((Transition.STARTED, "started"), (Transition.COMPLETED, "completed")), start=2
    ):
        office.portal.send(*(fleet_record(vm, sequence=sequence, transition=transition, seconds=40) for vm in (0, 1)))
        for each in (ann, vic):
            each.row(A).locator(".badge", has_text=state).wait_for()
    for each in (ann, bob, vic):
        assert each.page.evaluate("window.notReloaded") is True
    assert vic.page.locator("[data-list=over] > article").get_attribute("id") == f"event-{A}"


def test_typed_reason_stays_and_the_changed_event_is_not_chosen_any_more(office, window):
    ann = window(office.origin).sign_in("ann")
    ann.is_live()
    ann.page.wait_for_timeout(2_500)
    row = ann.row(A)
    row.locator("[name=reason]").fill("because")
    row.locator("[type=checkbox]").check()
    changed = {"sequence": 2, "seconds": 5, "event_type": "Reboot"}
    office.portal.send(fleet_record(0, **changed), fleet_record(1, **changed))
    _say(row, "Reboot of 2 VMs")
    assert row.locator("[name=reason]").input_value() == "because"
    assert not row.locator("[type=checkbox]").is_checked()


def test_word_that_is_taken_leaves_no_reason_behind_and_one_that_is_refused_says_why(office, window):
    ann, bob = (window(office.origin).sign_in(name) for name in ("ann", "bob"))
    for each in (ann, bob):
        each.is_live()
        each.page.wait_for_timeout(2_500)
    for address in ("**/?part=*", "**/decide"):  # Bob's page stays as it was, and sends nothing yet
        bob.page.route(address, lambda route: route.abort())
    ann.press(ann.row(A), "approve", reason="now")
    _say(ann.row(A), "“now”")
    assert ann.row(A).locator("[name=reason]").input_value() == ""
    ann.press(ann.row(A), "hold", reason="no")
    _say(ann.row(A), "ann holds it")
    bob.press(bob.row(A), "approve", reason="late")
    bob.page.wait_for_selector("#live:has-text('The portal did not receive it')")
    assert bob.row(A).locator("[name=reason]").input_value() == "late"
    bob.page.unroute("**/decide")
    bob.row(A).locator("button.approve").click()
    _say(bob.page, "Withdraw the hold to approve the event.")
    assert bob.page.url == f"{office.origin}/decide"


def test_click_right_after_a_change_counts_for_nothing_and_the_page_says_so_and_is_live_again(office, window):
    ann = window(office.origin).sign_in("ann")
    ann.is_live()
    ann.page.wait_for_timeout(2_500)
    ann.page.evaluate(
        """([list, button]) => new MutationObserver((_, observer) => {
            observer.disconnect();
            document.querySelector(button).click();
        }).observe(document.querySelector(list), { childList: true })""",
        ["[data-list=announced]", f"#event-{A} button.approve"],
    )
    office.portal.send(fleet_record(2, event_id="B", resources=("vm_2",)))
    ann.page.wait_for_selector(f"#live[data-state=away]:has-text('{JUST_CHANGED}')")
    ann.page.wait_for_selector("#live[data-state=live]")
    assert ann.row(A).locator("button.approve").is_visible()
    ann.press(ann.row(A), "approve", reason="now")
    _say(ann.row(A), "“now”")


def test_button_that_is_held_down_while_the_page_changes_is_pressed_and_not_lost(office, window):
    ann, bob = (window(office.origin).sign_in(name) for name in ("ann", "bob"))
    for each in (ann, bob):
        each.is_live()
        each.page.wait_for_timeout(2_500)
    ann.row(A).locator("button.approve").hover()
    ann.page.mouse.down()
    bob.press(bob.row(A), "hold", reason="no")
    _say(bob.row(A), "Held by bob")
    ann.page.wait_for_timeout(2_500)
    assert not ann.row(A).get_by_text("Held by bob").is_visible()
    ann.page.mouse.up()
    _say(ann.page, "Withdraw the hold to approve the event.")


def test_page_that_cannot_fetch_what_has_changed_says_so_and_asks_again(office, window):
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


def test_signing_out_elsewhere_leads_to_the_door(office, window):
    ann = window(office.origin).sign_in("ann")
    ann.is_live()
    second = ann.context.new_page()
    second.goto(f"{office.origin}/agents")
    second.get_by_role("button", name="Sign out").click()
    ann.page.wait_for_selector("h1:has-text('Sign in')")


def test_with_scripts_off_the_same_by_reloading(office, window):
    ann = window(office.origin, java_script_enabled=False).sign_in("ann")
    ann.press(ann.row(A), "approve", reason="without a script")
    _say(ann.row(A), "without a script")
    assert "Reload to see changes" in ann.page.locator("#live").inner_html()
    office.portal.send(*(fleet_record(vm, sequence=2, transition=Transition.STARTED, seconds=40) for vm in (0, 1)))
    ann.page.reload()
    ann.row(A).locator(".badge", has_text="started").wait_for()


def test_keyboard_alone_is_enough(office, window):
    ann = window(office.origin).sign_in("ann")
    ann.is_live()
    ann.page.wait_for_timeout(2_500)
    ann.page.keyboard.press("Tab")
    assert ann.page.evaluate("document.activeElement.className") == "skip"
    for _ in range(30):
        ann.page.keyboard.press("Tab")
        if ann.page.evaluate("document.activeElement.name") == "reason":
            break
    ann.page.keyboard.type("by keys")
    ann.page.keyboard.press("Tab")
    assert ann.page.evaluate("document.activeElement.value") == "approve"
    ann.page.keyboard.press("Enter")
    _say(ann.row(A), "by keys")
    assert ann.page.evaluate("document.activeElement.tagName") == "BODY"


def test_what_azure_says_runs_nothing(office, window):
    evil = fleet_record(0, sequence=2, event_id="E", resources=(EVIL,), event_type=EVIL, description=EVIL)
    office.portal.send(evil)
    ann = window(office.origin).sign_in("ann")
    ann.is_live()
    for path in ("/", f"/events/{E}", "/timeline", "/audit"):
        ann.go(path)
        ann.page.wait_for_timeout(300)
        assert ann.page.title() != "evil"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(office, window, theme):
    script = _axe()
    office.browser("bob").submit("/", "hold", reason="batch")
    office.portal.send(fleet_record(2, event_id="B", resources=("vm_2",)))
    office.poll(2, **ABLE)
    # axe puts its script into the page, which the policy forbids; the policy is held by every other test.
    ann = window(office.origin, color_scheme=theme, bypass_csp=True).sign_in("ann")
    found = []
    paths = ("/", f"/events/{A}", "/timeline", "/agents", "/audit", f"/decide?event={B}", "/events/none", "/login")
    for path in paths:
        ann.go(path)
        ann.page.wait_for_timeout(300)
        ann.page.evaluate(script)
        for violation in ann.page.evaluate("axe.run()")["violations"]:
            nodes = [node["html"][:200] for node in violation["nodes"]]
            found.append((path, violation["impact"], violation["id"], nodes))
    assert [each for each in found if each[1] in {"serious", "critical"}] == []


def _axe():
    path = os.environ.get("AXE_CORE")
    if path is None:
        pytest.skip("AXE_CORE does not name axe.min.js of the npm package axe-core")
    return Path(path).read_text(encoding="utf-8")


@pytest.fixture
def demo(agent_env, tmp_path):
    """The process of `demo --portal`, its address and the password, and when it was started."""
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


def test_three_agents_follow_a_click_in_the_demo(demo, window, tmp_path):
    process, origin, password, began = demo
    ann = window(origin).sign_in("ann", password)
    ann.is_live()
    ann.page.evaluate("window.notReloaded = true")
    row = ann.page.locator("article", has_text=f"Freeze of {len(VMS)} VMs")
    row.locator("button.approve").wait_for()
    assert time.monotonic() - began < 60  # from nothing to a page with an event to approve
    assert row.locator("button.approve span").inner_text() == f"starts the event now, for these 3 VMs: {', '.join(VMS)}"
    ann.press(row, "approve", reason="quiet")
    row.locator(".badge", has_text="started").wait_for()
    _say(row, "followed")
    row.locator(".badge", has_text="completed").wait_for()
    assert ann.page.evaluate("window.notReloaded") is True
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert list(tmp_path.glob("scheduled-events-bridge-demo-*")) == []
