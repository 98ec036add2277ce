"""The policy for a management group, which is the policy for a subscription at another scope."""

import json
import math
import re

import doc_pages
import pytest
from bicep import body, declared, decorators, literal, nodes, plain, properties, text

pytestmark = pytest.mark.deploy

PAGE = "docs/operate/management-group.md"
GROUP = "/providers/Microsoft.Management/managementGroups/contoso"
KINDS = ("parameter", "variable", "resource")
SUBSCRIPTION = "/subscriptions/00000000-0000-0000-0000-000000000000"


@pytest.fixture(scope="module")
def files(parse):
    """Return the syntax trees of the policy for each scope."""
    names = {"subscription": "fleet/policy.bicep", "managementGroup": "fleet/management-group.bicep"}
    return {scope: parse(name) for scope, name in names.items()}


def test_policies_of_both_scopes_are_the_same(files):
    for scope, root in files.items():
        [target] = nodes(root, "target_scope_assignment")
        assert literal(target.named_children[0]) == scope
    one, group = (
        {(kind, name): text(node) for kind in KINDS for name, node in declared(root, kind).items()}
        for root in files.values()
    )
    assert one.pop(("resource", "contributor")) != group.pop(("resource", "contributor"))
    assert one == group


def test_identity_has_the_required_role_on_the_management_group(files, deploy):
    root = files["managementGroup"]
    granted = properties(body(declared(root, "resource")["contributor"]))
    assert set(granted) == {"name", "properties"}  # without a scope, the role is assigned at the scope of the file
    assert "managementGroup().id" in text(granted["name"])
    assert plain(granted["properties"])["principalType"] == "ServicePrincipal"
    role = literal(declared(root, "variable")["contributorRoleId"].named_children[1])
    for rule in ("virtual-machines", "scale-sets"):
        then = json.loads((deploy / "azure" / "fleet" / f"{rule}.json").read_text(encoding="utf-8"))["then"]
        assert then["details"]["roleDefinitionIds"] == [f"/providers/Microsoft.Authorization/roleDefinitions/{role}"]


def assignment_name(root, ring):
    """Return the name of the assignment of *ring*."""
    name = properties(body(declared(root, "resource")["assignments"]))["name"]
    return text(name).strip("'").replace("${ring.name}", ring)


def test_assignment_names_fit_the_azure_limit(files):
    rings = json.loads(doc_pages.marked(doc_pages.page("docs/operate/fleet.md"), "file: rings.json"))
    [longest] = re.findall(r"can have at most (\d+) characters", doc_pages.page(PAGE))
    for name in [*(each["name"] for each in rings), "r" * int(longest)]:
        # "Naming rules and restrictions for Azure resources": 24 characters at the scope of a management group
        assert len(assignment_name(files["managementGroup"], name)) <= 24


def value(node, names):
    """Return the value of an expression of remediation.bicep."""
    if node.type == "ternary_expression":
        branch = "consequence" if value(node.child_by_field_name("condition"), names) else "alternative"
        return value(node.child_by_field_name(branch), names)
    if node.type == "string":
        return re.sub(r"\$\{(\w+)\}", lambda found: names[found[1]], text(node)[1:-1])
    if node.type == "identifier":
        found = names[text(node)]
        return found if isinstance(found, str) else value(found, names)
    if node.type == "member_expression":
        return names[text(node)]
    arguments = [value(each, names) for each in node.child_by_field_name("arguments").named_children]
    return {
        "empty": lambda given: not given,
        "tenantResourceId": lambda kind, name: f"/providers/{kind}/{name}",
        "extensionResourceId": lambda scope, kind, name: f"{scope}/providers/{kind}/{name}",
    }[text(node.child_by_field_name("function"))](*arguments)


@pytest.mark.parametrize(("group", "scope"), [("", SUBSCRIPTION), ("contoso", GROUP)])
def test_remediation_task_names_the_assignment_of_its_scope(parse, files, group, scope):
    root = parse("fleet/remediation.bicep")
    variables = {name: node.named_children[1] for name, node in declared(root, "variable").items()}
    names = {**variables, "ring": "canary", "managementGroupName": group, "subscription().id": SUBSCRIPTION}
    name = assignment_name(files["managementGroup" if group else "subscription"], "canary")
    for task in declared(root, "resource").values():
        wanted = properties(properties(body(task))["properties"])
        assert value(wanted["policyAssignmentId"], names) == (
            f"{scope}/providers/Microsoft.Authorization/policyAssignments/{name}"
        )
        # Azure refuses this mode at the scope of a management group, so the task belongs to a subscription.
        assert literal(wanted["resourceDiscoveryMode"]) == "ReEvaluateCompliance"
    [target] = nodes(root, "target_scope_assignment")
    assert literal(target.named_children[0]) == "subscription"


def test_documented_durations_match_the_formula_and_the_template(parse):
    page = doc_pages.page(PAGE)
    formula = "duration = ceiling(VMs / (tasks * parallelDeployments)) * minutes per VM"
    assert doc_pages.marked(page, "rollout: duration").strip() == formula
    rows = re.findall(r"^\| ([\d,]+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) h (\d+) min \|$", page, re.MULTILINE)
    assert len(rows) >= 3
    for row in rows:
        count, tasks, parallel, each, hours, rest = (int(cell.replace(",", "")) for cell in row)
        assert divmod(math.ceil(count / (tasks * parallel)) * each, 60) == (hours, rest)
    root = parse("fleet/remediation.bicep")
    limits = decorators(root, "parallelDeployments")
    default = literal(declared(root, "parameter")["parallelDeployments"].named_children[-1])
    assert f"{limits['minValue']} to {limits['maxValue']}, default {default}" in page
