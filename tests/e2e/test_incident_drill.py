"""The documented drill for a stolen key, with the commands of the page: disable, revoke, and enable approvals."""

import re
import subprocess

import doc_pages
from approval_stage import only

REBOOTS = """
[[approval.rules]]
name = "reboots"
event_types = ["Reboot"]
action = "approve"
resources = "any"
act = "each"
"""
PAGE = doc_pages.page("docs/operate/emergency.md")
INSTALLED = "/var/lib/scheduled-events-bridge"


def run_from_page(stage, command):
    """Run the line of the page that begins with *command* on the state directory of this test."""
    [line] = re.findall(rf"^{command} {INSTALLED}/approvals\.disabled", PAGE, re.MULTILINE)
    subprocess.run(line.replace(INSTALLED, str(stage.agent.state)), shell=True, check=True)


def outcomes(stage):
    """Return (EventId, source, result) of each record with an approval."""
    return [
        (each["event"] and each["event"]["event_id"], each["approval"]["source"], each["approval"]["result"])
        for each in stage.agent.records
        if each["approval"] is not None
    ]


def test_only_decisions_of_the_stolen_key_are_rejected_after_the_drill(stage):
    stolen = stage.signer("stolen")
    stage.start(stage.anne, stolen, rules=REBOOTS)
    run_from_page(stage, "touch")
    by_stolen, by_anne, by_both, by_rule = (
        *(stage.event() for _ in range(3)),
        stage.event(event_type="Reboot"),
    )
    stage.put(stolen.decide(by_stolen), stage.anne.decide(by_anne), stolen.decide(by_both), stage.anne.decide(by_both))
    stage.wait(lambda: sum(result == "disabled" for _, _, result in outcomes(stage)) >= 4)
    assert not stage.posted

    stolen.public_key_file.unlink()
    run_from_page(stage, "rm")
    stage.wait_posted(by_anne, by_both, by_rule)

    later = stage.event()
    stage.put(stolen.decide(later))
    control = stage.control()
    assert stage.posted == only(by_anne, by_both, by_rule, control)
    found = outcomes(stage)
    assert (by_stolen["event"]["event_id"], "portal", "unknown_key") in found
    stage.end()
