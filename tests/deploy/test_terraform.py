"""The Terraform module creates the same resources as the Bicep files, and the page passes the module's variables.

No package registry has the azapi provider, so `terraform validate` cannot run. python-hcl2 parses the files.
"""

import re

import doc_pages
import pytest
from bicep import declared, literal

pytestmark = pytest.mark.deploy


@pytest.fixture(scope="module")
def module(deploy, package):
    """Return the files of the module, read, by their names."""
    hcl2 = package("hcl2")
    return {path.stem: hcl2.loads(path.read_text("utf-8")) for path in (deploy / "terraform" / "fleet").glob("*.tf")}


@pytest.fixture(scope="module")
def made(module):
    """Return the resources of the module by their names."""
    found = {}
    for each in module["main"]["resource"]:
        for kind, named in each.items():
            if not kind.startswith("__"):
                assert kind.strip('"') == "azapi_resource"
                found.update({name.strip('"'): inner for name, inner in named.items() if not name.startswith("__")})
    return found


@pytest.fixture(scope="module")
def bicep(parse):
    """Return the type and version of each resource that deploy/azure/fleet creates."""
    roots = [parse(f"fleet/{name}.bicep") for name in ("application", "policy", "remediation")]
    return {
        literal(node.named_children[1])
        for root in roots
        for node in declared(root, "resource").values()
        if "existing" not in {child.type for child in node.children}
    }


def plain(value):
    """Return a string of python-hcl2 without its quotes."""
    return value.strip('"')


def test_terraform_and_bicep_create_the_same_resources(made, bicep):
    assert {plain(each["type"]) for each in made.values()} == bicep


def test_documented_example_passes_the_variables_of_the_module(module, package):
    shown = package("hcl2").loads(
        doc_pages.marked(doc_pages.page("docs/operate/fleet-terraform.md"), "terraform: module")
    )
    [given] = (arguments for named in shown["module"] for arguments in named.values())
    variables = {
        plain(name): inner
        for each in module["variables"]["variable"]
        for name, inner in each.items()
        if not name.startswith("__")
    }
    assert (doc_pages.ROOT / plain(given.pop("source")) / "main.tf").exists()
    names = {name for name in given if not name.startswith("__")}
    assert {name for name, variable in variables.items() if "default" not in variable} <= names <= set(variables)
    for name, items in (("rings", given["rings"]), ("versions", given["versions"].values())):
        fields = dict(re.findall(r"(\w+) = (optional)?", variables[name]["type"]))
        for item in items:
            assert {field for field in fields if not fields[field]} <= set(item) <= set(fields)
