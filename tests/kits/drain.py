"""A drain command whose end the test decides."""

from __future__ import annotations

import json
import sys
from pathlib import Path


class Drain:
    """A program that writes a line for each run and ends when *go* exists. If *is_polite*, it exits 0 on SIGTERM."""

    def __init__(self, folder: Path, name: str = "drain", *, is_polite: bool = False) -> None:
        self.program, self.runs_file, self.go = folder / f"{name}.py", folder / f"{name}.runs", folder / f"{name}.go"
        self.program.write_text(
            "import json, os, pathlib, signal, sys, time\n"
            f"if {is_polite}:\n    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
            "record = json.load(sys.stdin)\n"
            f"with open({str(self.runs_file)!r}, 'a') as runs:\n"
            "    runs.write(json.dumps([record['event']['event_id'], os.environ['SCHEDULED_EVENT_EVENT_ID'],"
            " os.environ['SCHEDULED_EVENT_RULE']]) + '\\n')\n"
            f"go = pathlib.Path({str(self.go)!r})\n"
            "while not go.exists():\n    time.sleep(0.02)\n"
            "print('3 pods are left', file=sys.stderr)\n"
            "sys.exit(int(go.read_text() or '0'))\n"
        )

    @property
    def command(self) -> tuple[str, str]:
        return (sys.executable, str(self.program))

    @property
    def runs(self) -> list[list[str]]:
        """Return the EventId of the record, the EventId of the environment, and the rule of each run."""
        if not self.runs_file.exists():
            return []
        return [json.loads(line) for line in self.runs_file.read_text().splitlines()]

    def end(self, code: int = 0) -> None:
        """End the running program and all later ones with the exit code *code*."""
        waiting = self.go.with_suffix(".new")
        waiting.write_text(str(code))
        waiting.rename(self.go)
