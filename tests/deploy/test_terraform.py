"""The Terraform module, held against the Bicep: the same resources, the same bodies, the same commands and rules.

Its provider, azapi, comes through no package registry, so `terraform validate` cannot run. python-hcl2 reads every
file, and where there is a terraform (or tofu) its console computes the bodies, which need no provider. azapi sends them
to Azure as they are, so what test_azure.py says of the Bicep's is true of these.
"""

import json
import os
import re
import shutil
import subprocess

import doc_pages
import pytest
from bicep import UNKNOWN, body, declared, literal, properties, text

pytestmark = pytest.mark.deploy

#: What a module of a fleet may be given, and the same for the Bicep.
GIVEN = {
    "subscription_id": "S",
    "resource_group_id": "/subscriptions/S/resourceGroups/gallery",
    "location": "westeurope",
    "versions": {"1.0.0": {"package_url": "https://example.net/package?sig=a", "config_url": ""}},
    "rings": [
        {"name": "canary", "version": "1.1.0"},
        {"name": "early", "version": "1.0.0", "resource_groups": ["a", "b"]},
        {"name": "rest", "version": "1.0.0", "resource_groups": ["c"], "everything_else": True},
    ],
}
#: Resources of the module, and where their bodies stand in its locals.
BODIES = {
    "gallery": "gallery",
    "application": "application",
    "version": "application_version",
    "definition": "definitions",
    "initiative": "initiative",
    "assignment": "assignments",
    "remediation": "remediations",
}
#: The files of the Bicep.
FLEET = ("application", "policy", "remediation")


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
def console(deploy, tmp_path_factory):
    """Return a function that computes one value of the module's locals."""
    program = shutil.which("terraform") or shutil.which("tofu")
    if program is None:
        pytest.skip("neither terraform nor tofu is on this machine, and no package registry has them")
    # Without main.tf: the provider is not here. In a tree of the same shape, as the files lie beside the module.
    top = tmp_path_factory.mktemp("terraform")
    shutil.copytree(deploy / "azure" / "fleet", top / "azure" / "fleet")
    here = top / "terraform" / "fleet"
    here.mkdir(parents=True)
    for name in ("variables.tf", "locals.tf"):
        shutil.copy(deploy / "terraform" / "fleet" / name, here)
    environment = {**os.environ, "CHECKPOINT_DISABLE": "1", "TF_CLI_CONFIG_FILE": os.devnull}

    def compute(expression, **values):
        (here / "given.auto.tfvars.json").write_text(json.dumps({**GIVEN, **values}))
        done = subprocess.run(
            [program, "console"], input=f"jsonencode({expression})\n", cwd=here, env=environment,
            capture_output=True, text=True, check=False, timeout=150,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(json.loads(done.stdout))

    compute.program = program
    return compute


@pytest.fixture(scope="module")
def bicep(deploy, package):
    """Return the resources of deploy/azure/fleet: type with version, and the body as far as it is known here."""
    tree_sitter, grammar = package("tree_sitter"), package("tree_sitter_bicep")
    parser = tree_sitter.Parser(tree_sitter.Language(grammar.language()))
    directory = deploy / "azure" / "fleet"
    found = {}
    for name in FLEET:
        root = parser.parse((directory / f"{name}.bicep").read_bytes()).root_node
        names = {key: node.named_children[1] for key, node in declared(root, "variable").items()}
        for key, node in declared(root, "resource").items():
            if "existing" not in {child.type for child in node.children}:
                found[name, key] = (literal(node.named_children[1]), known(body(node), names, directory))
    return found


def known(node, names, directory):
    """Return *node* as Python has it, with the files that it loads and the variables that it names."""
    if node.type == "object":
        return {key: known(value, names, directory) for key, value in properties(node).items()}
    if node.type == "array":
        return [known(child, names, directory) for child in node.named_children if child.type != "comment"]
    if node.type == "identifier" and text(node) in names:
        return known(names[text(node)], names, directory)
    loaded = re.fullmatch(r"loadJsonContent\('(.+)'\)", text(node))
    if loaded:
        return json.loads((directory / loaded[1]).read_text("utf-8"))
    member = re.fullmatch(r"(\w+)\.(\w+)", text(node))
    if member and member[1] in names:
        return known(names[member[1]], names, directory)[member[2]]
    return literal(node)


def compare(ours, theirs, path=""):
    """Compare what the Bicep has with what Terraform has, but for what only Azure can tell."""
    if ours is UNKNOWN:
        return
    if isinstance(ours, dict):
        assert isinstance(theirs, dict), path
        assert set(ours) == set(theirs), path
        for key, value in ours.items():
            compare(value, theirs[key], f"{path}.{key}")
    elif isinstance(ours, list):
        assert len(ours) == len(theirs), path
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            compare(mine, other, f"{path}[{index}]")
    else:
        assert ours == theirs, path


def plain(value):
    """Return a string of python-hcl2 without its quotes."""
    return value.strip('"')


def test_both_make_the_same_resources(made, bicep):
    # Bicep writes each definition and each task by itself, Terraform once for all.
    ours = {kind for kind, _ in bicep.values()}
    assert {plain(each["type"]) for each in made.values()} == ours


def test_every_body_comes_from_the_values_that_are_compared(made):
    for name, value in BODIES.items():
        looped = "for_each" in made[name] and name != "version"
        if looped:
            assert made[name]["for_each"] == f"${{local.{value}}}"
            assert made[name]["body"] in ("${each.value}", "${each.value.body}")
        else:
            assert made[name]["body"] == f"${{local.{value}}}"


def test_bodies_are_those_of_the_bicep(console, bicep):
    names = ("gallery", "application", "definitions", "initiative", "assignments", "remediations")
    theirs = console(f"{{{', '.join(f'{name} = local.{name}' for name in names)}}}")

    def same(file, name, body):
        compare(bicep[file, name][1]["properties"], body["properties"], name)

    same("application", "gallery", theirs["gallery"])
    same("application", "application", theirs["application"])
    same("policy", "initiative", theirs["initiative"])
    for name in ("virtualMachines", "scaleSets"):
        same("policy", name, theirs["definitions"][name]["body"])
    for each in theirs["assignments"].values():
        same("policy", "assignments", each)
    for each in theirs["remediations"].values():
        same("remediation", each["body"]["properties"]["policyDefinitionReferenceId"], each["body"])


def test_a_version_has_the_same_commands_and_its_secrets_apart(console, bicep, made):
    ours = bicep["application", "applicationVersion"][1]["properties"]
    theirs = console("local.application_version.properties")
    source = ours["publishingProfile"].pop("source")
    compare(ours, theirs, "version")
    assert theirs["publishingProfile"]["manageActions"] == ours["publishingProfile"]["manageActions"]
    secret = json.dumps(made["version"]["sensitive_body"])
    assert all(key in secret for key in source)


def test_rings_are_what_they_are_in_bicep(console):
    found = console("{for name, each in local.assignments : name => each.properties.parameters}")
    own = "/subscriptions/S/resourceGroups/gallery/providers/Microsoft.Compute/galleries/scheduled_events_bridge"
    for ring in GIVEN["rings"]:
        values = {name: one["value"] for name, one in found[ring["name"]].items()}
        assert values == {
            "effect": "DeployIfNotExists",
            "versionId": f"{own}/applications/scheduled-events-bridge/versions/{ring['version']}",
            "tagName": "scheduled-events-bridge",
            "ring": ring["name"],
            "resourceGroups": ring.get("resource_groups", []),
            "everythingElse": ring.get("everything_else", False),
            "resourceGroupsOfRings": ["a", "b", "c"],
        }


def test_a_new_version_of_a_ring_is_a_new_task_and_the_other_rings_keep_theirs(console):
    before = set(console("keys(local.remediations)"))
    changed = [{**GIVEN["rings"][0], "version": "1.2.0"}, *GIVEN["rings"][1:]]
    after = set(console("keys(local.remediations)", rings=changed))
    canary = "scheduled-events-bridge-canary"
    assert after - before == {f"{canary}-{kind}-1-2-0" for kind in ("virtual-machines", "scale-sets")}
    assert len(after & before) == 4
    assert console("keys(local.remediations)", remediate=False) == []


def test_every_value_of_the_module_is_explained(module):
    for each in [*module["variables"]["variable"], *module["outputs"]["output"]]:
        for name, inner in each.items():
            if not name.startswith("__"):
                assert plain(inner["description"]).endswith("."), name


def test_files_are_as_terraform_writes_them(console, deploy):
    done = subprocess.run(
        [console.program, "fmt", "-check", "-diff", deploy / "terraform" / "fleet"],
        env={**os.environ, "CHECKPOINT_DISABLE": "1", "TF_CLI_CONFIG_FILE": os.devnull},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_module_is_given_on_the_page_what_it_takes(module, package):
    shown = package("hcl2").loads(doc_pages.marked(doc_pages.page("docs/operate/fleet.md"), "terraform: module"))
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
