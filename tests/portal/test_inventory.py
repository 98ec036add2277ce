"""The inventory file: CSV, JSON, and invalid files."""

import json

import doc_pages
import pytest

from bridge.errors import ConfigurationError
from bridge.portal.inventory import InventoryEntry, read_inventory

VM_ID = "7ef1d8a4-0c2b-4c7e-9a35-1f5f6d1f2b90"
ENTRY = InventoryEntry(
    vm_key=VM_ID, name="westno_0", groups=("resource_group:west", "labels.team:payments", "labels.tier:1")
)


def test_documented_inventory_file_is_valid(tmp_path):
    [block] = [
        each for each in doc_pages.blocks(doc_pages.page("docs/howto/portal-people.md")) if each.mark == "file: vms.csv"
    ]
    (tmp_path / "vms.csv").write_text(block.text, encoding="utf-8")
    assert read_inventory(tmp_path / "vms.csv") == [ENTRY]


def test_json_file_has_the_same_members(tmp_path):
    vm = {
        "vmId": VM_ID.upper(),
        "name": "WestNO_0",
        "resourceGroup": "West",
        "labels": {"team": "payments", "tier": "1"},
    }
    (tmp_path / "vms.json").write_text(json.dumps([vm]), encoding="utf-8")
    assert read_inventory(tmp_path / "vms.json") == [ENTRY]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "must contain a list"),
        ("[1]", "VM 1 in .* is not an object"),
        ('[{"vmId": "x", "name": "a"}]', "needs vmId"),
        (json.dumps([{"vmId": VM_ID}]), "needs vmId .* and name"),
        (json.dumps([{"vmId": VM_ID, "name": "a"}] * 2), "twice"),
        ("[", "not a valid CSV or JSON"),
    ],
)
def test_invalid_file_is_rejected(tmp_path, text, message):
    (tmp_path / "vms.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=message):
        read_inventory(tmp_path / "vms.json")


def test_file_that_is_not_utf_8_is_rejected(tmp_path):
    (tmp_path / "vms.csv").write_bytes("vmId,name\n\u00e4".encode("utf-16"))
    with pytest.raises(ConfigurationError, match="not a valid CSV or JSON"):
        read_inventory(tmp_path / "vms.csv")
