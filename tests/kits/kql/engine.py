"""Runs the KQL queries with duckdb-kql, which translates them for DuckDB and rejects inexact translations.

The engine is not Kusto, but its authors compare it with Microsoft's emulator. The missing ingestion_time is a column.
Rows arrive as in Azure: through the ingestion mapping, or through the transformation.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from kql.files import Kql, Platform

_TYPES = {
    "string": "VARCHAR",
    "int": "INTEGER",
    "long": "BIGINT",
    "real": "DOUBLE",
    "bool": "BOOLEAN",
    "datetime": "TIMESTAMP",
    "dynamic": "JSON",
}
_INGESTED = "ingested_at_of_the_engine"

Row = dict[str, Any]
#: A CloudEvent with its arrival times in the event hub and in the table.
Arrival = tuple[dict[str, Any], datetime, datetime]


class Database:
    """The table of one platform, filled with arrivals."""

    def __init__(self, engine: Any, kql: Kql, platform: str, arrivals: Iterable[Arrival], *, now: datetime) -> None:
        self._engine, self._now = engine, now
        self._platform: Platform = kql.platforms[platform]
        self._connection = engine.connect()
        columns = ", ".join(f'"{name}" {_TYPES[kind]}' for name, kind in self._platform.columns.items())
        self._connection.execute(f'CREATE TABLE {self._platform.table} ({columns}, "{_INGESTED}" TIMESTAMP)')
        if platform == "data-explorer":
            self._ingest(kql.mapping, arrivals)
        else:
            self._transform(kql.transform, arrivals)

    def _ingest(self, mapping: Mapping[str, str], arrivals: Iterable[Arrival]) -> None:
        for event, enqueued, ingested in arrivals:
            message = {**event, "x-opt-enqueued-time": enqueued.isoformat()}
            row = {column: _at(message, path) for column, path in mapping.items()}
            self._insert([self._value(column, row.get(column)) for column in self._platform.columns], ingested)

    def _transform(self, transform: str, arrivals: Iterable[Arrival]) -> None:
        self._connection.execute("CREATE TABLE source (RawData VARCHAR)")
        sql = self._engine.to_sql(transform, schema={"source": ["RawData"]})
        for event, _enqueued, ingested in arrivals:
            self._connection.execute("DELETE FROM source")
            self._connection.execute("INSERT INTO source VALUES (?)", [json.dumps(event)])
            for row in self._connection.execute(sql).fetchall():
                self._insert(list(row), ingested)

    def _insert(self, values: list[Any], ingested: datetime) -> None:
        marks = ", ".join("?" * (len(values) + 1))
        self._connection.execute(f"INSERT INTO {self._platform.table} VALUES ({marks})", [*values, _naive(ingested)])

    def _value(self, column: str, value: Any) -> Any:
        """Return *value* as Kusto stores it: a text is never null, and a text column converts other values."""
        kind = self._platform.columns[column]
        if kind == "string":
            return "" if value is None else value if isinstance(value, str) else json.dumps(value)
        if kind == "dynamic":
            return None if value is None else json.dumps(value)
        if kind == "datetime" and value is not None:
            return _naive(datetime.fromisoformat(value.replace("Z", "+00:00")))
        return value

    def ask(self, query: str) -> list[Row]:
        """Return the rows of *query*."""
        body = self._platform.function_body.replace("ingestion_time()", _INGESTED)
        functions = [f"function ScheduledEventRecords(period: timespan) {{ {body} }}"]
        answer = self._engine.query(self._connection, query, functions=functions, query_now=self._now)
        return [dict(zip(answer.columns, row, strict=True)) for row in answer.fetchall()]


def _at(message: Mapping[str, Any], path: str) -> Any:
    """Return the value at the path `$.a.b` of *message*, or None."""
    found: Any = message
    for name in path.removeprefix("$.").split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _naive(moment: datetime) -> datetime:
    """Return the UTC time *moment* in the format of the engine."""
    return moment.replace(tzinfo=None)
