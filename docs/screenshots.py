"""Creates the pictures of the portal pages in the documentation.

Run `python docs/screenshots.py` after you change a page or its style. The program needs the extra [portal], the package
playwright, and Debian's Chromium. It opens the pages of a portal with sample events and a fixed clock.

For each picture, docs/images/NAME.txt contains the structure and the text of the page and a hash of its style. A test
compares this file with the page, because the pixels of a picture depend on the installed fonts.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "tests" / "kits"), str(ROOT)]

from browser_kit import Watched, chromium  # noqa: E402  # after the path is set
from fleet_records import fleet_record, vm_id_of  # noqa: E402
from page_kit import AT_11_01, Office  # noqa: E402

from bridge.events.record import Approval, Transition  # noqa: E402
from bridge.portal.fleet import key_of_event_id  # noqa: E402

IMAGES = ROOT / "docs" / "images"
_VMS = ("vm_0", "vm_1", "vm_2")
_FREEZE = {
    "resources": _VMS,
    "description": "Virtual machine is being paused because of a memory-preserving Live Migration operation.",
}
_REBOOT = {
    "event_id": "B",
    "resources": _VMS[:1],
    "event_type": "Reboot",
    "duration_seconds": None,
    "description": "Virtual machine is going to be restarted as requested by an authorized user.",
    "event_source": "User",
}
_SIZE = {"width": 1280, "height": 820}
_REPORTS = {"version": "0.1.0", "kids": ["p1"]}


def _now(_: Office, window: Watched) -> None:
    """Show two announced events, one of which is held."""
    window.go(f"/events/{key_of_event_id('B')}")
    window.press(window.event(), "hold", reason="wait for the backup")
    window.event().get_by_text("wait for the backup").first.wait_for()
    window.go("/")
    window.row(key_of_event_id("A")).wait_for()
    window.is_live()


def _started(office: Office, window: Watched) -> None:
    """Show an approved event that has started."""
    window.go(f"/events/{key_of_event_id('A')}")
    window.is_live()
    freeze = window.event()
    window.press(freeze, "approve", reason="the batch is over")
    freeze.get_by_text("the batch is over").first.wait_for()
    for vm in range(3):
        index = office.poll(vm, **_REPORTS)["index"]
        office.poll(vm, index=index, **_REPORTS)
    entries = office.portal.get("/audit").json()["entries"]
    [approved] = [entry for entry in entries if entry["action"] == "approved"]
    hash_of = approved["details"]["events"][0]["decisions"]
    for vm in range(3):
        if vm_id_of(vm) in hash_of:
            approval = Approval(source="portal", result="accepted", jws_sha256=(hash_of[vm_id_of(vm)],))
            record = fleet_record(vm, sequence=3, transition=Transition.APPROVED, seconds=61, **_FREEZE)
            office.portal.send(replace(record, approval=approval))
    office.portal.send(
        *(fleet_record(vm, sequence=4, transition=Transition.STARTED, seconds=62, **_FREEZE) for vm in range(3))
    )
    freeze.locator(".badge", has_text="started").wait_for()
    window.is_live()


#: Name of a picture -> the steps that lead from the sample events to the page.
SHOTS: dict[str, Callable[[Office, Watched], None]] = {"portal-now": _now, "portal-event": _started}


@contextmanager
def opened(browser: Any, directory: Path) -> Iterator[tuple[Office, Watched]]:
    """Yield a portal with two announced events, and the browser window of an approver."""
    with Office(directory) as office:
        office.portal.send(*(fleet_record(vm, **_FREEZE) for vm in range(3)), fleet_record(0, sequence=2, **_REBOOT))
        for vm in range(3):
            office.poll(vm, **_REPORTS)
        window = Watched(browser, office.origin, viewport=_SIZE)
        window.page.clock.set_fixed_time(AT_11_01.now())
        try:
            yield office, window.sign_in("ann")
        finally:
            window.context.close()


def described(window: Watched) -> str:
    """Return the structure and the text of the page, and a hash of its style."""
    style = window.context.request.get(f"{window.origin}/static/portal.css").body()
    return f"style: {hashlib.sha256(style).hexdigest()}\n{window.page.locator('body').aria_snapshot()}\n"


def shown(browser: Any, name: str) -> tuple[bytes, str]:
    """Return the picture of the page *name* as a PNG, and the description of the page."""
    with tempfile.TemporaryDirectory() as directory, opened(browser, Path(directory)) as (office, window):
        SHOTS[name](office, window)
        return window.page.screenshot(), described(window)


def main() -> int:
    """Write each picture whose page has changed. With --all, write every picture."""
    with chromium() as browser:
        for name in SHOTS:
            file = IMAGES / f"{name}.txt"
            picture, description = shown(browser, name)
            if "--all" in sys.argv or not file.exists() or file.read_text(encoding="utf-8") != description:
                file.write_text(description, encoding="utf-8")
                file.with_suffix(".png").write_bytes(picture)
                sys.stdout.write(f"{name} is updated\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
