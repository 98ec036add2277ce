"""The rollout to existing VMs: the commands of the VM Application, and the policy rules on sample resources.

The tests run without Azure. The commands run with the real archive and installer in a temporary root, and with an
installer that fails. tests/kits/azure_policy.py evaluates the rules and supports only their language features.
"""

import json
import os
import platform
import re
import subprocess
import tarfile

import doc_pages
import pytest
from azure_policy import Policy

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(900)]

NAME = "scheduled-events-bridge"
PACKAGE = f"{NAME}.tar"
VM, SCALE_SET = "Microsoft.Compute/virtualMachines", "Microsoft.Compute/virtualMachineScaleSets"
#: Rule, resource type, and the path of the VM model in the resource.
KINDS = {"virtual-machines": (VM, ()), "scale-sets": (SCALE_SET, ("virtualMachineProfile",))}


@pytest.fixture(scope="module")
def fleet(deploy):
    """Return a function that reads one JSON file of deploy/azure/fleet."""
    return lambda name: json.loads((deploy / "azure" / "fleet" / f"{name}.json").read_text(encoding="utf-8"))


# ---- the commands ---------------------------------------------------------------------------------------------------


def test_commands_fit_the_azure_limits(fleet):
    commands = fleet("commands")
    assert set(commands) == {"install", "update", "remove"}
    for command in commands.values():
        assert len(command) <= 4096  # Azure's limit for each
        assert "\n" not in command


@pytest.fixture
def vm(fleet, tmp_path):
    """Return a function that runs a command as the extension does: with bash, in the directory of this version."""
    directory = tmp_path / NAME / "1.0.0"
    directory.mkdir(parents=True)

    def run(name, **environment):
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **environment}
        command = ["/bin/bash", "-c", fleet("commands")[name]]
        return subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, check=False, timeout=420)

    run.directory = directory
    return run


INSTALLER = """\
#!/bin/sh
# Stands in for the installer. Records its arguments and the archive next to it, and exits with $ENDS.
printf '%s %s\\n' "$(basename "$(pwd)")" "$*" >>"$TOLD"
[ -f "$(dirname "$0")/built-for" ] || exit 90
cat "$(dirname "$0")/built-for" >>"$TOLD"
exit "${ENDS:-0}"
"""


def stub_package(vm, tmp_path, arches=("x86_64", "arm64"), kinds=(NAME,)):
    """Put a package of archives with the recording installer into the directory of *vm*."""
    with tarfile.open(vm.directory / PACKAGE, "w") as package:
        for arch in arches:
            for kind in kinds:
                top = tmp_path / f"{kind}-{arch}" / f"{NAME}-0.1.0-linux-{arch}"
                top.mkdir(parents=True)
                if kind == NAME:
                    (top / "install.sh").write_text(INSTALLER)
                    (top / "built-for").write_text(f"{arch}\n")
                else:
                    (top / "built-for-extras").write_text("")
                path = top.parent / f"{kind}-0.1.0-linux-{arch}.tar.gz"
                with tarfile.open(path, "w:gz") as archive:
                    archive.add(top, top.name)
                package.add(path, path.name)
    return tmp_path / "told"


OWN_ARCH = {"aarch64": "arm64"}.get(platform.machine(), platform.machine())


@pytest.mark.parametrize("command", ["install", "update"])
@pytest.mark.parametrize("has_config", [True, False])
def test_archive_of_this_architecture_is_installed_with_the_given_config(vm, tmp_path, command, has_config):
    told = stub_package(vm, tmp_path)
    if has_config:
        (vm.directory / "config.toml").write_text("")
    done = vm(command, TOLD=str(told))
    assert done.returncode == 0, done.stderr
    assert told.read_text() == f"1.0.0 {'--config config.toml' if has_config else ''}\n{OWN_ARCH}\n"


@pytest.mark.parametrize("command", ["install", "update", "remove"])
@pytest.mark.parametrize("ends", [1, 2, 73])
def test_command_returns_the_exit_code_of_the_installer(vm, tmp_path, command, ends):
    told = stub_package(vm, tmp_path)
    assert vm(command, TOLD=str(told), ENDS=str(ends)).returncode == ends
    assert [path.name for path in vm.directory.iterdir()] == [PACKAGE]  # no unpacked file remains


@pytest.mark.parametrize("command", ["install", "update", "remove"])
def test_package_that_is_broken_or_lacks_this_architecture_fails(vm, tmp_path, command):
    told = stub_package(vm, tmp_path, arches=("s390x",))
    assert vm(command, TOLD=str(told)).returncode != 0
    (vm.directory / PACKAGE).write_bytes(b"no archive")
    assert vm(command, TOLD=str(told)).returncode != 0
    (vm.directory / PACKAGE).unlink()
    assert vm(command, TOLD=str(told)).returncode != 0
    assert not told.exists()


@pytest.fixture
def real_vm(vm, artifacts, tmp_path, service_python):
    """Return *vm* with the archives of a release, and its root directory."""
    with tarfile.open(vm.directory / PACKAGE, "w") as package:
        for path in artifacts.glob(f"{NAME}-[0-9]*-linux-{OWN_ARCH}.tar.gz"):
            package.add(path, path.name)
    root = tmp_path / "root"
    shell = tmp_path / "bin" / "sh"  # adds the root and a Python that is visible to the service
    shell.parent.mkdir()
    shell.write_text(
        f'#!/bin/sh\ncase $* in *--uninstall*) set -- "$@" --root {root} ;; '
        f'*) set -- "$@" --root {root} --python {service_python} ;; esac\nexec /bin/sh "$@"\n'
    )
    shell.chmod(0o755)
    return (lambda command: vm(command, PATH=f"{shell.parent}:{os.environ['PATH']}:/usr/sbin:/sbin")), root


def test_real_installer_installs_rejects_a_failed_update_and_removes(real_vm, vm):
    run, root = real_vm
    root.mkdir()
    assert run("remove").returncode == 0  # a missing installation is not an error
    config, link = root / f"etc/{NAME}/config.toml", root / f"opt/{NAME}/venv"
    (vm.directory / "config.toml").write_text('[[sinks]]\ntype = "stdout"\n')
    done = run("install")
    assert done.returncode == 0, done.stderr
    assert config.read_text() == '[[sinks]]\ntype = "stdout"\n'
    first = link.readlink()
    (vm.directory / "config.toml").write_text("no_such_key = 1\n")
    refused = run("update")
    assert refused.returncode == 1
    assert "This version refuses config.toml. The service was not changed" in refused.stderr
    assert (link.readlink(), "stdout" in config.read_text()) == (first, True)
    state = root / f"var/lib/{NAME}/outbox-1.db"
    state.parent.mkdir(parents=True)
    state.write_text("not delivered yet")
    assert run("remove").returncode == 0
    assert (link.exists(), config.exists(), state.exists()) == (False, True, True)


# ---- the rules ------------------------------------------------------------------------------------------------------

GALLERY = "/subscriptions/S/resourceGroups/gallery/providers/Microsoft.Compute/galleries/g"
APPLICATION = f"{GALLERY}/applications/{NAME}"
OTHER = {"packageReferenceId": f"{GALLERY}/applications/other/versions/3.0.0", "order": 1}
#: The rings of a rollout in its last step.
RINGS = {
    "canary": {"resourceGroups": [], "everythingElse": False},
    "early": {"resourceGroups": ["Test-VMs"], "everythingElse": False},
    "rest": {"resourceGroups": [], "everythingElse": True},
}


def policy(fleet, rule, ring="canary", version="1.0.0", **values):
    given = {
        "versionId": f"{APPLICATION}/versions/{version}",
        "tagName": NAME,
        "ring": ring,
        "resourceGroupsOfRings": [name for each in RINGS.values() for name in each["resourceGroups"]],
        **RINGS[ring],
        **values,
    }
    return Policy(fleet(rule), fleet("parameters"), given)


def resource(rule, *, applications=None, group="prod", os_type="Linux", **tags):
    """Return a VM or a scale set as Azure shows it."""
    kind, path = KINDS[rule]
    model = {"storageProfile": {"osDisk": {"osType": os_type}}, "osProfile": {"adminUsername": "azureuser"}}
    if applications is not None:
        model["applicationProfile"] = {"galleryApplications": applications}
    properties = {path[0]: model, "upgradePolicy": {"mode": "Manual"}} if path else model
    tags = {name.replace("_", "-"): value for name, value in tags.items()}
    identifier = f"/subscriptions/S/resourceGroups/{group}/providers/{kind}/web"
    return {
        "id": identifier,
        "type": kind,
        "name": "web",
        "location": "westeurope",
        "tags": tags,
        "properties": properties,
    }


def applications_of(found):
    model = found["properties"].get("virtualMachineProfile", found["properties"])
    return model.get("applicationProfile", {}).get("galleryApplications")


def in_ring(ring):
    return {"scheduled_events_bridge": ring}


@pytest.mark.parametrize("rule", KINDS)
@pytest.mark.parametrize(
    ("what", "ring"),
    [
        (in_ring("canary"), "canary"),
        (in_ring("EARLY"), "early"),
        ({"group": "test-vms"}, "early"),
        ({"group": "test-vms", **in_ring("canary")}, "canary"),  # the tag takes precedence over the group
        ({}, "rest"),
        (in_ring("none"), None),
        (in_ring("canry"), None),  # a typo matches no ring
        ({"group": "test-vms", **in_ring("none")}, None),
        ({"os_type": "Windows", **in_ring("canary")}, None),
    ],
)
def test_each_vm_is_in_at_most_one_ring(fleet, rule, what, ring):
    found = [name for name in RINGS if policy(fleet, rule, name).applies(resource(rule, **what))]
    assert found == ([ring] if ring else [])


@pytest.mark.parametrize("rule", KINDS)
def test_documented_rings_assign_each_vm(fleet, deploy, rule):
    rings = json.loads(doc_pages.marked(doc_pages.page("docs/operate/fleet.md"), "file: rings.json"))
    groups = [name for each in rings for name in each["resourceGroups"]]

    def rings_of(**what):
        found = resource(rule, **what)
        return [
            each["name"]
            for each in rings
            if policy(
                fleet,
                rule,
                ring=each["name"],
                version=each["version"],
                resourceGroupsOfRings=groups,
                resourceGroups=each["resourceGroups"],
                everythingElse=each["everythingElse"],
            ).applies(found)
        ]

    assert rings_of(**in_ring("canary")) == ["canary"]
    assert rings_of(group="test-vms") == ["early"]
    assert rings_of() == ["rest"]
    template = (deploy / "azure" / "fleet" / "policy.bicep").read_text(encoding="utf-8")
    assert set(re.findall(r"\bring\.(\w+)", template)) == {key for each in rings for key in each}


def test_aks_nodes_are_excluded(fleet):
    nodes = resource("scale-sets", aks_managed_poolName="nodepool1")
    assert not [ring for ring in RINGS if policy(fleet, "scale-sets", ring).applies(nodes)]


@pytest.mark.parametrize("rule", KINDS)
@pytest.mark.parametrize(
    "before",
    [
        None,
        [],
        [OTHER],
        [{"packageReferenceId": f"{APPLICATION}/versions/0.9.0"}, OTHER],
        [OTHER, {"packageReferenceId": f"{APPLICATION.upper()}/versions/0.9.0"}],
        [{"packageReferenceId": f"{APPLICATION}-else/versions/1.0.0"}],
        [{"packageReferenceId": f"{APPLICATION}/versions/1.0.0.1"}],
    ],
)
def test_vm_without_the_version_receives_it_and_keeps_other_settings(fleet, rule, before):
    asked = policy(fleet, rule)
    vm = resource(rule, applications=before, **in_ring("canary"))
    assert not asked.complies(vm)
    after = asked.remediate(vm)
    assert asked.complies(after)
    own = f"{APPLICATION}/versions/".lower()
    others = [one for one in before or [] if not one["packageReferenceId"].lower().startswith(own)]
    found = applications_of(after)
    assert [one for one in found if not one["packageReferenceId"].lower().startswith(own)] == others
    (given,) = (one for one in found if one["packageReferenceId"].lower().startswith(own))
    assert given["packageReferenceId"] == f"{APPLICATION}/versions/1.0.0"
    # A single VM that fails stops the task of its ring; a scale set must be able to grow without the agent.
    assert given["treatFailureAsDeploymentFailure"] is (rule == "virtual-machines")
    assert given["enableAutomaticUpgrade"] is False  # the ring decides the time
    (after_model, before_model) = (
        found["properties"].get("virtualMachineProfile", found["properties"]) for found in (after, vm)
    )
    assert {**after_model, "applicationProfile": 0} == {**before_model, "applicationProfile": 0}
    assert asked.remediate(after) == after


@pytest.mark.parametrize("rule", KINDS)
@pytest.mark.parametrize("effect", ["AuditIfNotExists", "Disabled"])
def test_audit_policy_changes_no_vm(fleet, rule, effect):
    vm = resource(rule, **in_ring("canary"))
    asked = policy(fleet, rule, effect=effect)
    assert not asked.complies(vm)
    assert asked.remediate(vm) == vm


# ---- limits of Azure for a rule -------------------------------------------------------------------------------------
