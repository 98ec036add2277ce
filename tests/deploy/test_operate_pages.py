"""Scripts of docs/operate: the removal of the agent from VMs, and the units that fetch secrets."""

import json
import os
import subprocess
import sys

import doc_pages
import pytest
from unit_file import findings

pytestmark = pytest.mark.deploy

NAME = "scheduled-events-bridge"
#: Simulates `az vm list`, whose --query is JMESPath, with vms.json, and records all other commands.
AZ = """#!{python}
import json, pathlib, sys
import jmespath
here = pathlib.Path(__file__).parent
if sys.argv[1:3] == ["vm", "list"]:
    found = jmespath.search(sys.argv[sys.argv.index("--query") + 1], json.loads((here / "vms.json").read_text()))
    print("\\n".join("\\t".join(row) if isinstance(row, list) else row for row in found))
else:
    with (here / "asked").open("a") as file:
        file.write(json.dumps(sys.argv[1:]) + "\\n")
"""


def test_documented_removal_affects_only_vms_with_just_this_application(package, tmp_path):
    package("jmespath")
    galleries = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/galleries/apps/applications"
    ours, backup = f"{galleries}/{NAME}/versions/1.0.0", f"{galleries}/{NAME}-backup/versions/1.0.0"
    applications = {"none": None, "empty": [], "ours": [ours], "also": [ours], "both": [ours, backup], "not": [backup]}
    vms = [{"id": "/vms/bare", "name": "bare", "resourceGroup": "g", "applicationProfile": None}]
    for name, found in applications.items():
        listed = None if found is None else [{"packageReferenceId": reference} for reference in found]
        profile = {"galleryApplications": listed}
        vms.append({"id": f"/vms/{name}", "name": name, "resourceGroup": "g", "applicationProfile": profile})
    (tmp_path / "vms.json").write_text(json.dumps(vms))
    (tmp_path / "az").write_text(AZ.format(python=sys.executable))
    (tmp_path / "az").chmod(0o755)
    blocks = doc_pages.blocks(doc_pages.page("docs/operate/fleet.md"), "sh")
    [script] = [block.text for block in blocks if "az vm list" in block.text]
    done = subprocess.run(
        ["sh", "-eu", "-c", script], env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "g\tboth\n")
    [asked] = [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]
    [setting] = [word for word in asked if "galleryApplications" in word]
    assert asked[:5] == ["vm", "update", "--ids", "/vms/ours", "/vms/also"]
    assert setting == "applicationProfile.galleryApplications=[]"


UNITS = ("fetch-secrets.service", "fetch-secrets.timer")


def test_systemd_analyze_accepts_the_units_of_the_secrets_page(tool, tmp_path):
    page = doc_pages.page("docs/operate/secrets.md")
    program = tmp_path / "fetch-secrets"
    program.write_text(doc_pages.marked(page, "file: fetch-secrets"))
    program.chmod(0o755)

    def judged(change):
        for name in UNITS:
            text = doc_pages.marked(page, f"unit: {name}").replace("/usr/local/sbin/fetch-secrets", str(program))
            (tmp_path / name).write_text(change(text))
        return findings(tool("systemd-analyze"), *(tmp_path / name for name in UNITS))[1]

    assert judged(lambda text: text) == ""
    assert "OnBootSeconds" in judged(lambda text: text.replace("OnBootSec", "OnBootSeconds"))
