"""The Bicep files, without the Bicep compiler: its grammar, then every resource against the models of Microsoft's SDKs.

The compiler comes through no package registry. tree-sitter-bicep parses; names, modules and functions are resolved
here; the keys, the types and the enumerated values of a resource are looked up in azure-mgmt-compute, -eventhub,
-authorization, -msi, -monitor, -loganalytics and -resource-policy, which are made from the same specifications as the
types of the compiler. What cloud-init gets is put together as Bicep would, and cloud-init itself
judges it. What the rules of fleet/ do is in test_fleet.py.
"""

import base64
import hashlib
import importlib
import inspect
import json
import re
import shutil
import subprocess
import typing
from functools import cache
from pathlib import Path

import pytest
from bicep import UNKNOWN, body, declared, decorators, literal, nodes, plain, properties, text

from bridge.config import loader

pytestmark = pytest.mark.deploy

AZURE = Path(__file__).parents[2] / "deploy" / "azure"
FILES = sorted(path.relative_to(AZURE).as_posix() for path in AZURE.rglob("*.bicep"))

#: Of all functions those that are used, with the number of arguments (Microsoft, "Bicep functions").
FUNCTIONS = {
    "base64": 1,
    "deployment": 0,
    "empty": 1,
    "filter": 2,
    "flatten": 1,
    "guid": 3,
    "join": 2,
    "json": 1,
    "loadFileAsBase64": 1,
    "loadJsonContent": 1,
    "loadTextContent": 1,
    "map": 2,
    "replace": 3,
    "resourceGroup": 0,
    "split": 2,
    "startsWith": 2,
    "subscription": 0,
    "subscriptionResourceId": 2,
    "take": 2,
    "uniqueString": 1,
    "utcNow": 1,
}
DECORATORS = {"allowed", "description", "minValue", "maxValue", "minLength", "maxLength", "secure"}
#: What Bicep itself adds to a resource.
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
#: Of it the released SDK knows an older version alone (Microsoft, "Remediations - Create Or Update", 2021-10-01).
REMEDIATION = "Microsoft.PolicyInsights/remediations"
REMEDIATION_KEYS = {
    "policyAssignmentId",
    "policyDefinitionReferenceId",
    "resourceDiscoveryMode",
    "resourceCount",
    "parallelDeployments",
    "failureThreshold",
    "filters",
}
#: Those of which the SDK has the newest version alone.
UNVERSIONED = {"azure.mgmt.monitor", "azure.mgmt.loganalytics"}

#: The first versions that know osImageNotificationProfile, and retentionDescription.
OLDEST = {"Microsoft.Compute": "2022-08-01", "Microsoft.EventHub": "2024-01-01"}

# ---- reading Bicep ----


@pytest.fixture(scope="module")
def parse(package):
    """Return a function that parses one file of deploy/azure."""
    tree_sitter, grammar = package("tree_sitter"), package("tree_sitter_bicep")
    parser = tree_sitter.Parser(tree_sitter.Language(grammar.language()))

    @cache
    def parsed(name):
        return parser.parse((AZURE / name).read_bytes()).root_node

    return parsed


def resources(parse):
    """Yield every resource that is made: its type, its version, and its object."""
    for name in FILES:
        for declaration in declared(parse(name), "resource").values():
            if "existing" in {child.type for child in declaration.children}:
                continue
            type_name, version = literal(declaration.named_children[1]).split("@")
            yield type_name, version, body(declaration)


def the_resource(parse, wanted):
    (found,) = (plain(node) for type_name, _, node in resources(parse) if type_name == wanted)
    return found


# ---- the language ----


def test_there_is_something_to_check():
    fleet = {"fleet/application.bicep", "fleet/policy.bicep", "fleet/remediation.bicep"}
    assert {"main.bicep", "eventhub.bicep", "logs.bicep", "scaleset.bicep"} | fleet == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_it_parses_without_an_error(parse, name):
    root = parse(name)
    wrong = [node.start_point.row + 1 for node in nodes(root, "ERROR")]
    assert not root.has_error, f"{name}: lines {wrong}"


@pytest.mark.parametrize("name", FILES)
def test_every_name_is_declared_and_every_declaration_used(parse, name):
    root = parse(name)
    known = {kind: set(declared(root, kind)) for kind in ("parameter", "variable", "resource", "module")}
    assert sum(map(len, known.values())) == len(set().union(*known.values())), "one name for two things"
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
def test_every_function_and_decorator_is_one_of_bicep(parse, name):
    root = parse(name)
    for call in nodes(root, "call_expression"):
        function, arguments = text(call.child_by_field_name("function")), call.child_by_field_name("arguments")
        if call.parent.type == "decorator":
            assert function in DECORATORS
        else:
            assert FUNCTIONS[function] == len(arguments.named_children), text(call)


@pytest.mark.parametrize("name", FILES)
def test_modules_exist_and_get_what_they_ask_for_and_nothing_else(parse, name):
    root = parse(name)
    for module, declaration in declared(root, "module").items():
        target = parse(literal(declaration.named_children[1]))
        asked = declared(target, "parameter")
        required = {name for name, node in asked.items() if len(node.named_children) == 2}
        given = set(properties(properties(body(declaration))["params"]))
        assert required <= given <= set(asked)
        read = set(re.findall(rf"\b{module}\.outputs\.(\w+)", text(root)))
        assert read <= set(declared(target, "output"))


@pytest.mark.parametrize("template", [name for name in FILES if name not in {"eventhub.bicep", "scaleset.bicep"}])
def test_defaults_are_within_their_bounds_and_every_parameter_of_a_template_is_explained(parse, template):
    root = parse(template)
    for name, node in declared(root, "parameter").items():
        found = decorators(root, name)
        assert found["description"].endswith("."), name
        if len(node.named_children) > 2 and "minValue" in found:
            assert found["minValue"] <= literal(node.named_children[2]) <= found["maxValue"], name


# ---- the resources ----


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
    """Return list["X"] and dict[str, "X"] with the X itself, which Python 3.10 leaves as it is."""
    arguments = typing.get_args(wanted)
    if arguments and isinstance(arguments[-1], str) and typing.get_origin(wanted) in {list, dict}:
        return typing.get_origin(wanted)[(*arguments[:-1], names[arguments[-1]])]
    return wanted


def is_typed(wanted):
    """Return whether *wanted* is a typed dictionary, that of typing_extensions too."""
    return isinstance(wanted, type) and hasattr(wanted, "__required_keys__")


def check(value, wanted, path, known):
    """Compare a node with what the SDK wants at *path*; *known* returns the keys of a type."""
    arguments = typing.get_args(wanted)
    if value.type == "ternary_expression":
        for branch in ("consequence", "alternative"):
            check(value.child_by_field_name(branch), wanted, path, known)
    elif is_typed(wanted):
        keys = known(wanted)
        for name, inner in parts(value, "object", path):
            assert name in keys, f"{path}.{name} is unknown; there are {sorted(keys)}"
            check(inner, keys[name], f"{path}.{name}", known)
    elif typing.get_origin(wanted) in {list, dict}:
        kind = "array" if typing.get_origin(wanted) is list else "object"
        for name, inner in parts(value, kind, path):
            check(inner, arguments[-1], f"{path}.{name}", known)
    elif wanted is not typing.Any:
        assert value.type not in {"object", "array"}, f"{path} is neither an object nor an array"
        check_value(literal(value), wanted, path)


def parts(value, kind, path):
    """Return the children of an object or array node with their names; none for an expression."""
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
        assert value in values, f"{path} is {value!r}; there are {sorted(values)}"
    else:
        assert type(value) is wanted, f"{path} is {value!r}, not of type {wanted.__name__}"


def test_every_resource_is_one_whose_model_is_known(parse):
    assert {type_name for type_name, _, _ in resources(parse)} == set(TYPED) | set(MAPPED) | {REMEDIATION}


def test_a_remediation_goes_on_for_all_of_a_ring_and_stops_when_too_many_fail(parse):
    found = [plain(node)["properties"] for type_name, _, node in resources(parse) if type_name == REMEDIATION]
    assert {one["policyDefinitionReferenceId"] for one in found} == {"virtualMachines", "scaleSets"}
    for one in found:
        assert set(one) <= REMEDIATION_KEYS
        assert one["resourceDiscoveryMode"] == "ReEvaluateCompliance"  # what Azure found a day ago is another ring
        assert one["resourceCount"] == 50_000  # the most that Azure takes; without it, 500
        assert set(one["failureThreshold"]) == {"percentage"}
    bounds = decorators(parse("fleet/remediation.bicep"), "parallelDeployments")
    assert (bounds["minValue"], bounds["maxValue"]) == (1, 30)


@pytest.mark.parametrize("type_name", TYPED)
def test_keys_types_and_values_are_those_of_the_sdk(parse, sdk, type_name):
    library, model = TYPED[type_name]
    known = {model: hints(sdk, library, model)}

    def keys(typed):
        return known.setdefault(typed.__name__, hints(sdk, library, typed.__name__))

    for found, _, node in resources(parse):
        if found == type_name:
            for name, value in properties(node).items():
                if name not in OF_BICEP:
                    assert name in known[model], f"{name} is unknown; there are {sorted(known[model])}"
                    check(value, known[model][name], name, keys)


@pytest.mark.parametrize("type_name", MAPPED)
def test_keys_are_those_of_the_sdk_and_none_that_is_required_is_missing(parse, sdk, type_name):
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
    """Return the properties of *node*, those of a JSON file that it loads too."""
    if node.type == "object":
        return properties(node)
    [path, inner] = re.fullmatch(r"loadJsonContent\('(.+)'\)\.(\w+)", text(node)).groups()
    return json.loads((AZURE / path).read_text(encoding="utf-8"))[inner]


def check_mapped(value, kind, models, path):
    """Compare plain *value* with *kind*, as an _attribute_map of *models* names it, at *path*."""
    if kind[0] in "[{":
        assert isinstance(value, list if kind[0] == "[" else dict), path
        for name, inner in enumerate(value) if kind[0] == "[" else value.items():
            check_mapped(inner, kind[1:-1], models, f"{path}.{name}")
    elif kind in {"str", "bool", "int"}:
        assert value is UNKNOWN or type(value).__name__ == kind, f"{path} is {value!r}"
    else:
        keys = {each["key"]: each["type"] for each in getattr(models, kind)._attribute_map.values()}
        for name, inner in value.items():
            assert name in keys, f"{path}.{name} is unknown; there are {sorted(keys)}"
            check_mapped(inner, keys[name], models, f"{path}.{name}")


@pytest.mark.parametrize("type_name", [name for name in MAPPED if MAPPED[name][0] in UNVERSIONED])
def test_what_stands_inside_is_of_the_sdk_too(parse, sdk, type_name):
    library, _, model = MAPPED[type_name]
    models = sdk(f"{library}.models")
    kinds = {each["key"]: each["type"] for each in getattr(models, model)._attribute_map.values()}
    (node,) = (node for found, _, node in resources(parse) if found == type_name)
    for name, value in body_of(properties(node)["properties"]).items():
        plain_value = plain(value) if hasattr(value, "children") else value
        check_mapped(plain_value, kinds[f"properties.{name}"], models, name)


def test_versions_are_released_know_what_is_used_and_are_none_of_the_future(parse, sdk):
    newest = inspect.getsource(sdk(f"{EVENT_HUB}._configuration")) + inspect.getsource(
        sdk(f"{COMPUTE}.operations._operations")
    )
    released = max(re.findall(r'"(20\d\d-\d\d-\d\d)"', newest))
    for type_name, version, _ in resources(parse):
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", version), "a preview may go any day"
        assert OLDEST.get(type_name.partition("/")[0], version) <= version <= released, type_name


# ---- what it must say ----


def test_deletions_and_os_upgrades_are_announced(parse):
    found = the_resource(parse, "Microsoft.Compute/virtualMachineScaleSets")
    profile = found["properties"]["virtualMachineProfile"]["scheduledEventsProfile"]
    assert profile["osImageNotificationProfile"] == {"enable": True, "notBeforeTimeout": "PT15M"}
    assert profile["terminateNotificationProfile"]["enable"] is True
    assert "'PT${terminateNoticeMinutes}M'" in text(parse("scaleset.bicep"))
    bounds = decorators(parse("main.bicep"), "terminateNoticeMinutes")
    assert (bounds["minValue"], bounds["maxValue"]) == (5, 15)


def test_os_upgrades_happen_by_themselves_and_have_the_health_that_they_require(parse):
    found = the_resource(parse, "Microsoft.Compute/virtualMachineScaleSets")["properties"]
    assert found["orchestrationMode"] == "Uniform"
    assert found["upgradePolicy"]["automaticOSUpgradePolicy"]["enableAutomaticOSUpgrade"] is True
    image = plain(declared(parse("main.bicep"), "parameter")["image"].named_children[2])
    assert image["version"] == "latest"
    (extension,) = found["virtualMachineProfile"]["extensionProfile"]["extensions"]
    assert extension["properties"]["type"] == "ApplicationHealthLinux"
    _, port = loader.StatusSettings().address
    assert extension["properties"]["settings"] == {"protocol": "http", "port": port, "requestPath": "/healthz"}


def test_the_state_disk_is_none_that_an_upgrade_exchanges(parse):
    found = the_resource(parse, "Microsoft.Compute/virtualMachineScaleSets")
    storage = found["properties"]["virtualMachineProfile"]["storageProfile"]
    assert "diffDiskSettings" not in storage["osDisk"]
    (disk,) = storage["dataDisks"]
    device = plain(declared(parse("main.bicep"), "parameter")["stateDisk"].named_children[2])
    assert device == f"/dev/disk/azure/scsi1/lun{disk['lun']}"


def test_only_the_one_identity_may_send_and_there_are_no_keys(parse):
    namespace = the_resource(parse, "Microsoft.EventHub/namespaces")["properties"]
    assert namespace["disableLocalAuth"] is True
    assert namespace["minimumTlsVersion"] >= "1.2"
    role = literal(declared(parse("eventhub.bicep"), "variable")["senderRoleId"].named_children[1])
    assert role == "2b629674-e913-4c01-ae53-ef4638d8f975"  # Azure Event Hubs Data Sender
    assignment = body(declared(parse("eventhub.bicep"), "resource")["sender"])
    assert text(properties(assignment)["scope"]) == "hub"
    assert plain(properties(assignment)["properties"])["principalType"] == "ServicePrincipal"


def test_records_go_to_the_table_by_the_transformation_that_is_tested(parse):
    rule = the_resource(parse, "Microsoft.Insights/dataCollectionRules")
    assert rule["kind"] == "Direct"  # the kind that has an address of its own
    [flow] = rule["properties"]["dataFlows"]
    root = parse("logs.bicep")
    variables = {name: text(node.named_children[1]) for name, node in declared(root, "variable").items()}
    assert variables["lines"] == "split(loadTextContent('kql/log-analytics/transform.kql'), '\\n')"
    assert variables["transform"] == "join(filter(lines, line => !startsWith(line, '/')), '\\n')"
    lines = (AZURE / "kql" / "log-analytics" / "transform.kql").read_text(encoding="utf-8").splitlines()
    assert all(line.startswith("//") for line in lines if line.startswith("/"))
    table = json.loads((AZURE / "kql" / "log-analytics" / "table.json").read_text(encoding="utf-8"))
    name = table["properties"]["schema"]["name"]
    assert (flow["outputStream"], flow["destinations"]) == (f"Custom-{name}", ["workspace"])
    assert the_resource(parse, "Microsoft.OperationalInsights/workspaces/tables")["name"] == name
    assert variables["stream"].startswith("'Custom-")


def test_function_of_the_template_is_the_one_that_the_page_saves(parse):
    saved = the_resource(parse, "Microsoft.OperationalInsights/workspaces/savedSearches")
    found = declared(parse("logs.bicep"), "resource")["records"]
    assert "loadTextContent('kql/log-analytics/ScheduledEventRecords.kql')" in text(found)
    page = (AZURE.parents[1] / "docs/howto/log-analytics.md").read_text(encoding="utf-8")
    [alias, parameters] = re.search(r"--fa (\S+) --fp '(\S+)'", page).groups()
    assert (saved["properties"]["functionAlias"], saved["properties"]["functionParameters"]) == (alias, parameters)


def test_only_the_one_identity_may_send_to_the_rule(parse):
    root = parse("logs.bicep")
    role = literal(declared(root, "variable")["senderRoleId"].named_children[1])
    assert role == "3913510d-42f4-4e42-8a64-420c390055eb"  # Monitoring Metrics Publisher
    assert text(properties(body(declared(root, "resource")["sender"]))["scope"]) == "rule"


@pytest.mark.parametrize("name", ["main.bicep", "scaleset.bicep"])
def test_the_address_of_the_wheel_stays_out_of_the_history_of_deployments(parse, name):
    assert decorators(parse(name), "wheelUrl")["secure"]


# ---- what the VMs get ----

SAMPLE = {
    "eventHubsHost": "fleet.servicebus.windows.net",
    "eventHubName": "scheduled-events",
    "identityClientId": "6a9e4c1e-0d5c-4c41-9d8a-0d1f6d2a7b11",
    "wheelUrl": "https://example.net/scheduled_events_bridge-0.1.0-py3-none-any.whl?sig=a%2Bb&se=2027",
    "wheelSha256": "0" * 64,
}


def evaluate(node, names):
    """Return the text of an expression of the few functions that put files together."""
    if node.type == "identifier":
        return names[text(node)] if isinstance(names[text(node)], str) else evaluate(names[text(node)], names)
    if node.type == "string":
        return literal(node)
    function = text(node.child_by_field_name("function"))
    arguments = [evaluate(child, names) for child in node.child_by_field_name("arguments").named_children]
    if function == "replace":
        assert arguments[1] in arguments[0], f"{arguments[1]} is nowhere to be replaced"
        return arguments[0].replace(arguments[1], arguments[2])
    if function == "base64":
        return base64.b64encode(arguments[0].encode()).decode()
    content = (AZURE / arguments[0]).read_bytes()
    return content.decode() if function == "loadTextContent" else base64.b64encode(content).decode()


@pytest.fixture
def cloud_init(parse):
    """Return the text that a VM gets."""
    root = parse("scaleset.bicep")
    variables = {name: node.named_children[1] for name, node in declared(root, "variable").items()}
    disk = literal(declared(parse("main.bicep"), "parameter")["stateDisk"].named_children[2])
    return evaluate(variables["cloudInit"], {**variables, **SAMPLE, "stateDisk": disk})


@pytest.fixture
def written(cloud_init, package):
    """Return the files that cloud-init writes, by their names."""
    files = package("yaml").safe_load(cloud_init)["write_files"]
    assert {file["encoding"] for file in files} == {"b64"}
    assert {file["permissions"] for file in files if file["path"].endswith(".sh")} == {"0755"}
    assert {str(Path(file["path"]).parent) for file in files} == {"/opt/scheduled-events-bridge/setup"}
    return {Path(file["path"]).name: base64.b64decode(file["content"], validate=True) for file in files}


def test_cloud_init_accepts_what_a_vm_gets(cloud_init, tool, tmp_path):
    assert "{{" not in cloud_init
    # Azure takes 64 KiB (Microsoft, "Custom data and cloud-init on Azure Virtual Machines").
    assert len(cloud_init.encode()) < 64 * 1024
    path = tmp_path / "user-data"
    path.write_text(cloud_init, encoding="utf-8")
    judged = subprocess.run(
        [tool("cloud-init"), "schema", "--config-file", str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert judged.returncode == 0, judged.stdout + judged.stderr
    assert "deprecat" not in (judged.stdout + judged.stderr).lower()


def test_the_installer_finds_all_that_it_needs_beside_it(written):
    wanted = set(re.findall(r'"\$here/([^"$]*|\$name[^"$]*)"', (AZURE.parent / "systemd" / "install.sh").read_text()))
    wanted -= {"built-for", "requirements.txt", "wheels"}  # of a release's archive, and not of a wheel
    assert {name.replace("$name", "scheduled-events-bridge") for name in wanted} <= set(written)
    ours = ("install.sh", "try_tree.py", "scheduled-events-bridge.service", "scheduled-events-bridge.sysusers.conf")
    for name in ours:
        assert written[name] == (AZURE.parent / "systemd" / name).read_bytes()


def test_the_setup_gets_the_wheel_its_sum_and_the_disk(cloud_init, written, package):
    ((program, *arguments),) = package("yaml").safe_load(cloud_init)["runcmd"]
    assert Path(program).name in written
    assert arguments == [SAMPLE["wheelUrl"], SAMPLE["wheelSha256"], "/dev/disk/azure/scsi1/lun0"]


def test_the_configuration_of_the_vms_sends_to_the_hub(written, tmp_path):
    path = tmp_path / "config.toml"
    path.write_bytes(written["config.toml"])
    settings = loader.load(path)
    (sink,) = settings.sinks
    assert sink.type_name == "eventhubs"
    assert sink.config.fully_qualified_namespace == SAMPLE["eventHubsHost"]
    assert sink.config.eventhub == SAMPLE["eventHubName"]
    assert sink.config.client_id == SAMPLE["identityClientId"]
    assert sink.config.heartbeat
    assert settings.heartbeat.interval_seconds > 0
    # The health extension asks the default address; the disk is mounted where the unit has the state by default.
    assert settings.status == loader.StatusSettings()
    assert settings.state.directory is None


def test_state_is_mounted_where_the_unit_keeps_it():
    unit = (AZURE.parent / "systemd" / "scheduled-events-bridge.service").read_text()
    (directory,) = re.findall(r"^StateDirectory=(.+)$", unit, re.MULTILINE)
    assert f"state=/var/lib/{directory}\n" in (AZURE / "setup.sh").read_text()


def test_shellcheck_finds_nothing_in_the_setup(tool):
    judged = subprocess.run(
        [tool("shellcheck"), str(AZURE / "setup.sh")], capture_output=True, text=True, check=False, timeout=60
    )
    assert judged.returncode == 0, judged.stdout


# ---- the disk that must not be emptied ----


@pytest.fixture
def set_up_disk(tool, tmp_path):
    """Return a function that runs the setup on a file in place of a disk, and only so far as it deals with the disk."""
    path = f"{tmp_path / 'bin'}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    for needed in ("blkid", "mkfs.ext4"):
        shutil.which(needed, path=path) or tool(needed)
    (tmp_path / "bin").mkdir()
    stop = tmp_path / "bin" / "mkdir"  # what follows the formatting would change this machine
    stop.write_text("#!/bin/sh\nexit 99\n")
    stop.chmod(0o755)
    sleep = tmp_path / "bin" / "sleep"  # the disk "late" comes after some waiting, and nobody waits here
    sleep.write_text(
        f"#!/bin/sh\nprintf x >>{tmp_path}/slept\n"
        f'[ "$(wc -c <{tmp_path}/slept)" -ne 9 ] || truncate --size 8M {tmp_path}/late\n'
    )
    sleep.chmod(0o755)
    shutil.copy(sleep, tmp_path / "bin" / "udevadm").write_text("#!/bin/sh\nexit 1\n")

    def run(disk, url="https://example.net/a.whl", digest="0" * 64, setup=AZURE / "setup.sh"):
        command = [str(setup), url, digest, str(disk)]
        return subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, check=False, timeout=60)

    def told(disk, tag):
        command = ["blkid", "-p", "-o", "value", "-s", tag, str(disk)]
        return subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, check=False).stdout.strip()

    return run, told


@pytest.mark.parametrize("name", ["scheduled-events-bridge-0.1.0-linux-x86_64.tar.gz", "a-0.1.0-py3-none-any.whl"])
def test_the_setup_installs_from_the_archive_by_its_own_installer_and_from_a_wheel_by_the_one_beside_it(
    set_up_disk, tmp_path, name
):
    run, _ = set_up_disk
    installer = f'#!/bin/sh\nprintf "%s %s\\n" "$0" "$*" >>{tmp_path}/installed\n'
    tree, here = tmp_path / "tree/scheduled-events-bridge-0.1.0-linux-x86_64", tmp_path / "setup"
    for directory in (tree, here):
        directory.mkdir(parents=True)
        (directory / "install.sh").write_text(installer)
        (directory / "install.sh").chmod(0o755)
        (directory / "config.toml").write_text(f"# {directory.name}\n")
    shutil.copy(AZURE / "setup.sh", here)
    (tmp_path / "goods").mkdir()
    goods = tmp_path / "goods" / name
    if name.endswith(".gz"):
        subprocess.run(["tar", "-C", tree.parent, "-czf", goods, tree.name], check=True, timeout=60)
    else:
        goods.write_bytes(b"a wheel")
    (tmp_path / "disk").write_bytes(bytes(8 * 1024 * 1024))
    # This machine is not to be changed: its fstab has the line, the disk is mounted, directories elsewhere are there.
    for program, lines in {
        "grep": "exit 0",
        "mountpoint": "exit 0",
        "systemctl": "exit 0",
        "curl": f'while [ "$1" != --output ]; do shift; done; cp {goods} "$2"',
        "mkdir": f'case "$*" in *{tmp_path}*) exec /bin/mkdir "$@" ;; esac',
    }.items():
        (tmp_path / "bin" / program).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / "bin" / program).chmod(0o755)
    url, digest = f"https://example.net/{name}?sig=a", hashlib.sha256(goods.read_bytes()).hexdigest()
    assert run(tmp_path / "disk", url, "0" * 64, setup=here / "setup.sh").returncode != 0
    assert not (tmp_path / "installed").exists()
    for _ in range(2):  # it may run again
        done = run(tmp_path / "disk", url, digest, setup=here / "setup.sh")
        assert done.returncode == 0, done.stderr
    how = f"{here}/archive/install.sh " if name.endswith(".gz") else f"{here}/install.sh {here}/{name}"
    assert (tmp_path / "installed").read_text().splitlines() == [how, how]
    if name.endswith(".gz"):
        assert (here / "archive/config.toml").read_text() == "# setup\n"


def test_an_empty_disk_is_formatted_and_one_that_came_through_a_reimage_is_not(set_up_disk, tmp_path):
    run, told = set_up_disk
    disk = tmp_path / "disk"
    disk.write_bytes(bytes(8 * 1024 * 1024))
    assert run(disk).returncode == 99
    assert (told(disk, "TYPE"), told(disk, "LABEL")) == ("ext4", "bridge-state")
    first = told(disk, "UUID")
    assert run(disk).returncode == 99
    assert told(disk, "UUID") == first


def test_a_disk_that_is_not_there_is_waited_for_and_then_ends_the_setup_with_the_parameter_to_look_at(
    set_up_disk, tmp_path
):
    run, _ = set_up_disk
    done = run(tmp_path / "absent")
    assert done.returncode == 1
    assert "stateDisk" in done.stderr
    assert len((tmp_path / "slept").read_text()) == 60
    assert not (tmp_path / "absent").exists()


def test_a_disk_that_comes_late_is_formatted(set_up_disk, tmp_path):
    run, told = set_up_disk
    assert run(tmp_path / "late").returncode == 99
    assert len((tmp_path / "slept").read_text()) == 9
    assert told(tmp_path / "late", "TYPE") == "ext4"
