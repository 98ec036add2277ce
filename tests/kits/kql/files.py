"""Parses the files of deploy/azure/kql/: the table, its mapping, the function, and the queries."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TABLE = re.compile(r"^\.create-merge table (\w+) \((.*?)^\)", re.DOTALL | re.MULTILINE)
_MAPPING = re.compile(r"ingestion json mapping \"\w+\"\s+```(.*?)```", re.DOTALL)
_FUNCTION = re.compile(r"^ScheduledEventRecords\((.*?)\) \{(.*?)^\}", re.DOTALL | re.MULTILINE)
_HEADER_COLUMN = re.compile(r"^//   (\w+)  +\S")
#: Type names of a workspace -> type names of Data Explorer.
_TYPES = {"boolean": "bool", "dateTime": "datetime"}


@dataclass(frozen=True)
class Platform:
    """The database of the queries: its table and its function."""

    table: str
    columns: dict[str, str]
    function_body: str

    @property
    def schema(self) -> dict[str, Any]:
        """Return the schema in the format of kusto_check.cjs."""
        columns = ", ".join(f"{name}: {kind}" for name, kind in self.columns.items())
        function = {"parameters": "(period: timespan)", "body": f"{{ {self.function_body} }}"}
        return {"tables": {self.table: f"({columns})"}, "functions": {"ScheduledEventRecords": function}}


class Kql:
    """The files below *directory*."""

    def __init__(self, directory: Path) -> None:
        self.setup = (directory / "data-explorer" / "setup.kql").read_text()
        self.transform = (directory / "log-analytics" / "transform.kql").read_text()
        self.queries = {path.stem: path.read_text() for path in sorted((directory / "queries").glob("*.kql"))}
        self._workspace = directory / "log-analytics"

    @property
    def mapping(self) -> dict[str, str]:
        """Return the path in the CloudEvent of each column."""
        rows = json.loads(_found(_MAPPING, self.setup)[0])
        assert all(set(row) == {"column", "Properties"} and set(row["Properties"]) == {"Path"} for row in rows)
        return {row["column"]: row["Properties"]["Path"] for row in rows}

    @property
    def platforms(self) -> dict[str, Platform]:
        return {"data-explorer": self._data_explorer(), "log-analytics": self._log_analytics()}

    def _data_explorer(self) -> Platform:
        name, text = _found(_TABLE, self.setup)
        columns = dict(re.findall(r"(\w+): (\w+)", text))
        parameters, body = _found(_FUNCTION, self.setup)
        assert parameters == "period: timespan"
        return Platform(name, columns, body)

    def _log_analytics(self) -> Platform:
        schema = json.loads((self._workspace / "table.json").read_text())["properties"]["schema"]
        columns = {each["name"]: _TYPES.get(each["type"], each["type"]) for each in schema["columns"]}
        return Platform(schema["name"], columns, (self._workspace / "ScheduledEventRecords.kql").read_text())


def header_columns(query: str) -> list[str]:
    """Return the columns in the header comment of *query*, in order."""
    header = query.partition("\nlet ")[0].partition("// Columns:\n")[2]
    return [found[1] for line in header.splitlines() if (found := _HEADER_COLUMN.match(line))]


def _found(pattern: re.Pattern[str], text: str) -> tuple[str, ...]:
    found = pattern.search(text)
    assert found, f"{pattern.pattern!r} was not found"
    return found.groups()
