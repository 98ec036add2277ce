"""The drawings of the documentation: the architecture, the path of a document, and the life of an event.

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


#: Name of a picture -> the function that draws it.
PICTURES: dict[str, Callable[[], Drawing]] = {"architecture": architecture}
