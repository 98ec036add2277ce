"""The Bicep files, checked without the Bicep compiler: the grammar, and each resource against Microsoft's SDK models.

No package registry has the compiler. tree-sitter-bicep parses the files, and the tests resolve names, modules, and
functions. The tests look up the keys, types, and enumerated values of a resource in azure-mgmt-compute, -eventhub,
-authorization, -msi, -monitor, -loganalytics, and -resource-policy. These packages are generated from the same
specifications as the types of the compiler. test_azure_setup.py covers cloud-init, and test_fleet.py the rules of
fleet/.
"""

import importlib
import json
import re
import typing

import pytest
from bicep import AZURE, UNKNOWN, body, declared, decorators, literal, nodes, plain, properties, text

pytestmark = pytest.mark.deploy

FILES = sorted(path.relative_to(AZURE).as_posix() for path in AZURE.rglob("*.bicep"))

#: The functions in use, with their number of arguments (Microsoft, "Bicep functions").
FUNCTIONS = {
    "base64": 1,
    "deployment": 0,
    "empty": 1,
    "extensionResourceId": 3,
    "filter": 2,
    "flatten": 1,
    "guid": 3,
    "join": 2,
    "json": 1,
    "loadFileAsBase64": 1,
    "loadJsonContent": 1,
    "loadTextContent": 1,
    "managementGroup": 0,
    "map": 2,
    "replace": 3,
    "resourceGroup": 0,
    "split": 2,
    "startsWith": 2,
    "subscription": 0,
    "subscriptionResourceId": 2,
    "take": 2,
    "tenantResourceId": 2,
    "uniqueString": 1,
    "utcNow": 1,
}

DECORATORS = {"allowed", "description", "minValue", "maxValue", "minLength", "maxLength", "secure"}

#: Properties that Bicep itself adds to a resource.
OF_BICEP = {"name", "parent", "scope", "dependsOn"}

COMPUTE, EVENT_HUB, POLICY = "azure.mgmt.compute", "azure.mgmt.eventhub", "azure.mgmt.resource.policy"

TYPED = {
    "Microsoft.Authorization/policyAssignments": (POLICY, "PolicyAssignment"),
    "Microsoft.Authorization/policyDefinitions": (POLICY, "PolicyDefinition"),
    "Microsoft.Authorization/policySetDefinitions": (POLICY, "PolicySetDefinition"),
    "Microsoft.Compute/galleries": (COMPUTE, "Gallery"),
    "Microsoft.Compute/galleries/applications": (COMPUTE, "GalleryApplication"),
    "Microsoft.Compute/galleries/applications/versions": (COMPUTE, "GalleryApplicationVersion"),
    "Microsoft.Compute/virtualMachineScaleSets": (COMPUTE, "VirtualMachineScaleSet"),
    "Microsoft.EventHub/namespaces": (EVENT_HUB, "EHNamespace"),
    "Microsoft.EventHub/namespaces/eventhubs": (EVENT_HUB, "Eventhub"),
    "Microsoft.EventHub/namespaces/eventhubs/consumergroups": (EVENT_HUB, "ConsumerGroup"),
}

MAPPED = {
    "Microsoft.Authorization/roleAssignments": (
        "azure.mgmt.authorization",
        "2022-04-01",
        "RoleAssignmentCreateParameters",
    ),
    "Microsoft.ManagedIdentity/userAssignedIdentities": ("azure.mgmt.msi", "2024-11-30", "Identity"),
    "Microsoft.Insights/dataCollectionRules": ("azure.mgmt.monitor", "2023-03-11", "DataCollectionRuleResource"),
    "Microsoft.OperationalInsights/workspaces/savedSearches": ("azure.mgmt.loganalytics", "2025-07-01", "SavedSearch"),
    "Microsoft.OperationalInsights/workspaces/tables": ("azure.mgmt.loganalytics", "2025-07-01", "Table"),
}


#: The libraries that contain only the newest version.
UNVERSIONED = {"azure.mgmt.monitor", "azure.mgmt.loganalytics"}


def resources(parse):
    """Yield the type, version, and object of every resource that the files create."""
    for name in FILES:
        for declaration in declared(parse(name), "resource").values():
            if "existing" in {child.type for child in declaration.children}:
                continue
            type_name, version = literal(declaration.named_children[1]).split("@")
            yield type_name, version, body(declaration)


def the_resource(parse, wanted):
    (found,) = (plain(node) for type_name, _, node in resources(parse) if type_name == wanted)
    return found


@pytest.mark.parametrize("name", FILES)
def test_bicep_file_parses_without_errors(parse, name):
    root = parse(name)
    wrong = [node.start_point.row + 1 for node in nodes(root, "ERROR")]
    assert not root.has_error, f"{name}: lines {wrong}"


@pytest.mark.parametrize("name", FILES)
def test_bicep_names_are_declared_and_used(parse, name):
    root = parse(name)
    known = {kind: set(declared(root, kind)) for kind in ("parameter", "variable", "resource", "module")}
    assert sum(map(len, known.values())) == len(set().union(*known.values())), "duplicate name"
    loops = {text(node.child_by_field_name("initializer")) for node in nodes(root, "for_statement")}
    loops |= {text(node.named_children[0]) for node in nodes(root, "lambda_expression")}
    used = set()
    for node in nodes(root, "identifier"):
        parent = node.parent
        is_name = parent.type.endswith("_declaration") and parent.named_children[0] == node
        is_key = parent.type == "object_property" and parent.named_children[0] == node
        is_function = parent.type == "call_expression" and parent.child_by_field_name("function") == node
        if not (is_name or is_key or is_function):
            used.add(text(node))
    assert used - loops <= set().union(*known.values())
    assert known["parameter"] | known["variable"] <= used


@pytest.mark.parametrize("name", FILES)
def test_bicep_functions_and_decorators_exist(parse, name):
    root = parse(name)
    for call in nodes(root, "call_expression"):
        function, arguments = text(call.child_by_field_name("function")), call.child_by_field_name("arguments")
        if call.parent.type == "decorator":
            assert function in DECORATORS
        else:
            assert FUNCTIONS[function] == len(arguments.named_children), text(call)


@pytest.mark.parametrize("name", FILES)
def test_modules_exist_and_receive_their_declared_parameters(parse, name):
    root = parse(name)
    for module, declaration in declared(root, "module").items():
        target = parse(literal(declaration.named_children[1]))
        asked = declared(target, "parameter")
        required = {name for name, node in asked.items() if len(node.named_children) == 2}
        given = set(properties(properties(body(declaration))["params"]))
        assert required <= given <= set(asked)
        read = set(re.findall(rf"\b{module}\.outputs\.(\w+)", text(root)))
        assert read <= set(declared(target, "output"))


@pytest.fixture(scope="module")
def sdk(package):
    """Return a function that imports a module of Microsoft's SDKs."""

    def load(name):
        package(".".join(name.split(".")[:3]))
        return importlib.import_module(name)

    return load


def hints(sdk, library, name):
    """Return the keys of a typed dictionary of *library* with their types."""
    types, models, extensions = sdk(f"{library}.types"), sdk(f"{library}.models"), sdk("typing_extensions")
    names = {**vars(models), **vars(types)}
    found = extensions.get_type_hints(getattr(types, name), names)
    return {key: unquoted(wanted, names) for key, wanted in found.items()}


def unquoted(wanted, names):
    """Resolve the quoted X of list["X"] and dict[str, "X"], which Python 3.10 does not resolve."""
    arguments = typing.get_args(wanted)
    if arguments and isinstance(arguments[-1], str) and typing.get_origin(wanted) in {list, dict}:
        return typing.get_origin(wanted)[(*arguments[:-1], names[arguments[-1]])]
    return wanted


def is_typed(wanted):
    """Return whether *wanted* is a typed dictionary, also from typing_extensions."""
    return isinstance(wanted, type) and hasattr(wanted, "__required_keys__")


def check(value, wanted, path, known):
    """Compare a node with the SDK's type at *path*. *known* returns the keys of a type."""
    arguments = typing.get_args(wanted)
    if value.type == "ternary_expression":
        for branch in ("consequence", "alternative"):
            check(value.child_by_field_name(branch), wanted, path, known)
    elif is_typed(wanted):
        keys = known(wanted)
        for name, inner in parts(value, "object", path):
            assert name in keys, f"{path}.{name} is unknown. Valid: {sorted(keys)}"
            check(inner, keys[name], f"{path}.{name}", known)
    elif typing.get_origin(wanted) in {list, dict}:
        kind = "array" if typing.get_origin(wanted) is list else "object"
        for name, inner in parts(value, kind, path):
            check(inner, arguments[-1], f"{path}.{name}", known)
    elif wanted is not typing.Any:
        assert value.type not in {"object", "array"}, f"{path} is neither an object nor an array"
        check_value(literal(value), wanted, path)


def parts(value, kind, path):
    """Return the children of an object or array node with their names, or no children for an expression."""
    assert value.type in {kind, "identifier", "null"}, f"{path} is not of the kind {kind}"
    if value.type == "object":
        return list(properties(value).items())
    return list(enumerate(child for child in value.named_children if child.type != "comment"))


def check_value(value, wanted, path):
    """Compare a literal with a simple type, or with the values of an enumeration."""
    if value is UNKNOWN or value is None:
        return
    enumerations = [kind for kind in typing.get_args(wanted) if kind is not str]
    if enumerations:
        values = {member.value for kind in enumerations for member in kind}
        assert value in values, f"{path} is {value!r}. Valid: {sorted(values)}"
    else:
        assert type(value) is wanted, f"{path} is {value!r}, not of type {wanted.__name__}"


@pytest.mark.parametrize("type_name", TYPED)
def test_resource_properties_match_the_typed_sdk_models(parse, sdk, type_name):
    library, model = TYPED[type_name]
    known = {model: hints(sdk, library, model)}

    def keys(typed):
        return known.setdefault(typed.__name__, hints(sdk, library, typed.__name__))

    for found, _, node in resources(parse):
        if found == type_name:
            for name, value in properties(node).items():
                if name not in OF_BICEP:
                    assert name in known[model], f"{name} is unknown. Valid: {sorted(known[model])}"
                    check(value, known[model][name], name, keys)


@pytest.mark.parametrize("type_name", MAPPED)
def test_resource_properties_match_the_sdk_models_and_required_keys_are_set(parse, sdk, type_name):
    library, version, model = MAPPED[type_name]
    module = sdk(f"{library}.models" if library in UNVERSIONED else f"{library}.v{version.replace('-', '_')}.models")
    attributes = getattr(module, model)._attribute_map
    keys = {attribute["key"] for attribute in attributes.values()}
    required = {
        attributes[name]["key"] for name, rule in getattr(module, model)._validation.items() if rule.get("required")
    }
    for found, used_version, node in resources(parse):
        if found == type_name:
            assert used_version <= version
            top = properties(node)
            inner = body_of(top["properties"]) if "properties" in top else {}
            given = (set(top) - OF_BICEP - {"properties"}) | {f"properties.{name}" for name in inner}
            assert given <= keys
            assert required <= given


def body_of(node):
    """Return the properties of *node*, including those of a JSON file that it loads."""
    if node.type == "object":
        return properties(node)
    [path, inner] = re.fullmatch(r"loadJsonContent\('(.+)'\)\.(\w+)", text(node)).groups()
    return json.loads((AZURE / path).read_text(encoding="utf-8"))[inner]


def test_event_hub_has_one_sender_identity_and_no_shared_keys(parse):
    namespace = the_resource(parse, "Microsoft.EventHub/namespaces")["properties"]
    assert namespace["disableLocalAuth"] is True
    assert namespace["minimumTlsVersion"] >= "1.2"
    role = literal(declared(parse("eventhub.bicep"), "variable")["senderRoleId"].named_children[1])
    assert role == "2b629674-e913-4c01-ae53-ef4638d8f975"  # Azure Event Hubs Data Sender
    assignment = body(declared(parse("eventhub.bicep"), "resource")["sender"])
    assert text(properties(assignment)["scope"]) == "hub"
    assert plain(properties(assignment)["properties"])["principalType"] == "ServicePrincipal"


def test_data_collection_rule_has_one_sender_identity(parse):
    root = parse("logs.bicep")
    role = literal(declared(root, "variable")["senderRoleId"].named_children[1])
    assert role == "3913510d-42f4-4e42-8a64-420c390055eb"  # Monitoring Metrics Publisher
    assert text(properties(body(declared(root, "resource")["sender"]))["scope"]) == "rule"


@pytest.mark.parametrize("name", ["main.bicep", "scaleset.bicep"])
def test_wheel_url_is_a_secure_parameter(parse, name):
    assert decorators(parse(name), "wheelUrl")["secure"]
