"""Reads the inventory file, which determines the names and groups of VMs."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from bridge.errors import ConfigurationError
from bridge.events.event import normal_name
from bridge.portal.grants import group_names

_VM_ID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class InventoryEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A VM of the inventory."""

    vm_key: str
    name: str
    groups: tuple[str, ...]


def read_inventory(path: Path) -> list[InventoryEntry]:
    """Return the VMs of the file. Raise ConfigurationError or OSError.

    A JSON file contains a list of objects, and a CSV file has a header line. Each VM has the fields `vmId`, `name`,
    `resourceGroup`, and `labels`. The labels are an object in JSON, and ``name=value;name=value`` in CSV.
    """
    try:
        text = path.read_text("utf-8-sig")
        rows: Any = json.loads(text) if path.suffix == ".json" else list(csv.DictReader(io.StringIO(text)))
    except (ValueError, csv.Error, RecursionError) as error:
        raise ConfigurationError(f"{path} is not a valid CSV or JSON file: {error}.") from error
    if not isinstance(rows, list):
        raise ConfigurationError(f"{path} must contain a list of VMs.")
    entries = [_entry(path, number, row) for number, row in enumerate(rows, start=1)]
    counts = Counter[object](each.vm_key for each in entries)
    counts.update((each.name, each.groups[:1]) for each in entries)
    for value, count in counts.items():
        if count > 1:
            raise ConfigurationError(f"{path} lists {value!r} twice.")
    return entries


def _entry(path: Path, number: int, row: Any) -> InventoryEntry:
    if not isinstance(row, dict):
        raise ConfigurationError(f"VM {number} in {path} is not an object.")
    vm_id, name = str(row.get("vmId") or "").strip().lower(), str(row.get("name") or "").strip()
    if not _VM_ID.fullmatch(vm_id) or not name:
        raise ConfigurationError(f"VM {number} in {path} needs vmId (a UUID) and name.")
    labels = row.get("labels") or {}
    if isinstance(labels, str):
        labels = dict(each.strip().split("=", 1) for each in labels.split(";") if "=" in each)
    if not isinstance(labels, dict):
        raise ConfigurationError(f"The labels of VM {number} in {path} are not an object.")
    group = str(row.get("resourceGroup") or "").strip()
    groups = group_names(group, labels)
    if any("\n" in each or "\0" in each for each in (name, *groups)):
        raise ConfigurationError(f"VM {number} in {path} has a control character.")
    return InventoryEntry(vm_key=vm_id, name=normal_name(name), groups=tuple(groups))
