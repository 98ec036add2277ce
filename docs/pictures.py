"""The drawings of the documentation, such as the architecture.

`docs/generate.py` writes each drawing to docs/images/NAME-light.svg and docs/images/NAME-dark.svg.
"""

from __future__ import annotations

from collections.abc import Callable

from drawing import Drawing


def architecture() -> Drawing:
    """Draw Azure, the agent, the destinations, and the portal."""
    drawing = Drawing(
        960,
        400,
        "The agent polls IMDS, keeps records in an outbox, sends them to sinks, and sends approvals to IMDS",
    )
    drawing.box(20, 40, 150, 320, "Azure", "Instance Metadata", "Service (IMDS)", color="blue")
    drawing.box(290, 20, 310, 360)
    drawing.text(445, 44, "Scheduled Events Bridge, on the VM", anchor="middle", is_bold=True)
    drawing.box(320, 62, 250, 64, "Poll", "compares each document", "with the previous one")
    drawing.box(320, 166, 250, 64, "Outbox", "records in memory, with a copy", "in a SQLite file", color="green")
    drawing.box(320, 286, 250, 74, "Approval", "checks the rule or the signature,", "then the event once more")
    drawing.box(
        750,
        40,
        190,
        190,
        "Sinks",
        "Event Hubs",
        "webhook, Slack, Teams",
        "Alertmanager, PagerDuty",
        "OTLP",
        "file, stdout, command",
        "your own",
        color="amber",
    )
    drawing.box(750, 286, 190, 74, "Ops portal (optional)", "a person approves", "or holds the event")
    drawing.arrow((320, 94), (170, 94))
    drawing.text(230, 86, "GET, each second", anchor="middle", size=12, color="faint")
    drawing.arrow((445, 126), (445, 166))
    drawing.text(455, 150, "records", size=12, color="faint")
    drawing.arrow((570, 198), (660, 198), (660, 135), (750, 135))
    drawing.text(668, 152, "one worker", size=12, color="faint")
    drawing.text(668, 168, "per sink", size=12, color="faint")
    drawing.arrow((445, 286), (445, 230))
    drawing.text(455, 262, "outcomes", size=12, color="faint")
    drawing.arrow((320, 323), (170, 323))
    drawing.text(230, 315, "POST, if approved", anchor="middle", size=12, color="faint")
    drawing.arrow((570, 323), (750, 323))
    drawing.text(675, 315, "asks for decisions", anchor="middle", size=12, color="faint")
    drawing.text(675, 341, "(HTTPS long poll)", anchor="middle", size=12, color="faint")
    return drawing


def document_path() -> Drawing:
    """Draw the modules that a document and a decision pass through."""
    drawing = Drawing(960, 430, "The modules that a document, its records, and a decision pass through, in order")
    rows = (
        (30, "A document", "blue", ("polling/poller", "imds/client", "imds/document", "events/tracker", "events/diff")),
        (280, "A decision", "amber", ("approval/portal_poller", "approval/inbox", "approval/approver", "imds/client")),
    )
    works = {
        "polling/poller": "once a second",
        "imds/client": "GET",
        "imds/document": "parse",
        "events/tracker": "confirm",
        "events/diff": "transitions",
        "approval/portal_poller": "long poll",
        "approval/inbox": "verify the signature",
        "approval/approver": "evaluate, save, look again",
    }
    for y, name, color, modules in rows:
        drawing.text(20, y + 14, name, is_bold=True)
        width = (920 - 24 * (len(modules) - 1)) / len(modules)
        for number, module in enumerate(modules):
            x = 20 + number * (width + 24)
            work = "GET, then POST" if color == "amber" and module == "imds/client" else works[module]
            drawing.box(x, y + 24, width, 52, module, work, color=color)
            if number:
                drawing.arrow((x - 24, y + 50), (x, y + 50))
    drawing.box(330, 170, 300, 60, "outbox", "state in memory; the saver writes the file", color="green")
    drawing.box(770, 170, 170, 60, "delivery/worker", "one thread per sink")
    drawing.arrow((859, 106), (859, 138), (480, 138), (480, 170))
    drawing.text(490, 132, "records, in one change", size=12, color="faint")
    drawing.arrow((630, 200), (770, 200))
    drawing.text(700, 192, "due records", size=12, color="faint", anchor="middle")
    drawing.arrow((369, 304), (369, 230))
    drawing.text(377, 272, "decision", size=12, color="faint")
    drawing.arrow((560, 304), (560, 230))
    drawing.text(568, 272, "attempt and outcome", size=12, color="faint")
    drawing.text(
        20, 392, "Pure: imds/document, events/*, approval/evaluate. They have no clock and no I/O.", color="faint"
    )
    drawing.text(20, 412, "Only outbox contains SQL, and only imds contains the URL of IMDS.", color="faint")
    return drawing


def event_life() -> Drawing:
    """Draw the records of a live migration on a time axis."""
    drawing = Drawing(960, 300, "The timeline of an event: announced, started, absent, and confirmed as completed")
    drawing.line((30, 130), (930, 130))
    steps = (
        (80, "blue line", "Azure announces", "11:00:00", "scheduled", "observed within 1 s"),
        (330, "amber line", "Azure starts", "11:15:02", "started", "observed within 1 s"),
        (590, "line", "event is absent", "11:15:40", "no record yet", "the agent waits"),
        (800, "green line", "fifth response agrees", "11:15:44", "completed", "observed_at 11:15:40"),
    )
    for x, color, happening, at, record, note in steps:
        drawing.dot(x, 130, color=color)
        drawing.text(x, 84, happening, anchor="middle", is_bold=True)
        drawing.text(x, 106, at, anchor="middle", color="faint")
        drawing.text(x, 162, record, anchor="middle", is_bold=True)
        drawing.text(x, 182, note, anchor="middle", size=12, color="faint")
    drawing.bar(86, 126, 238, 8, color="blue line")
    drawing.bar(336, 126, 248, 8, color="amber line")
    drawing.text(205, 40, "notice: drain or fail over", anchor="middle", color="faint")
    drawing.text(460, 40, "impact: a pause or a reboot", anchor="middle", color="faint")
    drawing.text(695, 40, "confirmation", anchor="middle", color="faint")
    for start, end in ((80, 330), (330, 590), (590, 800)):
        drawing.line((start + 2, 58), (start + 2, 50), (end - 2, 50), (end - 2, 58), color="grid")
    drawing.box(30, 215, 270, 60, "An approval", "lets Azure start the event earlier", color="plain")
    drawing.box(345, 215, 270, 60, "A cancellation", "absent before NotBefore: canceled", color="plain")
    drawing.box(660, 215, 270, 60, "No proof of the ending", "after a gap: inferred, or ended", color="plain")
    return drawing


#: Name of a picture -> the function that draws it.
PICTURES: dict[str, Callable[[], Drawing]] = {
    "architecture": architecture,
    "document-path": document_path,
    "event-life": event_life,
}
