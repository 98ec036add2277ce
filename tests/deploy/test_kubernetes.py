"""The manifests: built by kustomize, and checked against the Kubernetes schemas and their own configuration."""

import shutil
import subprocess
from pathlib import Path

import doc_pages
import pytest
from kubernetes_manifests import VERSIONS, check_schema, mount, only, volume_of
from kubernetes_stub import RIGHTS

from bridge.config import loader

pytestmark = pytest.mark.deploy

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
BUILDS = sorted(str(path.parent.relative_to(KUBERNETES)) for path in KUBERNETES.rglob("kustomization.yaml"))


@pytest.fixture(scope="module", params=BUILDS)
def build(request):
    """Return the directory of one kustomization."""
    return request.param


@pytest.fixture(scope="module")
def manifests(build, kustomized):
    """Return the manifests of the kustomization."""
    return kustomized(KUBERNETES / build)


@pytest.fixture
def pod(manifests):
    return only(manifests, "DaemonSet")["spec"]["template"]["spec"]


@pytest.fixture
def agent(pod):
    (container,) = pod["containers"]
    return container


@pytest.fixture
def environment(agent):
    """Return the variables that the manifest sets for the agent."""
    return {each["name"]: each["value"] for each in agent["env"] if "value" in each}


@pytest.fixture
def settings(manifests, pod, environment, tmp_path):
    """Return the settings from the ConfigMap that the pod mounts and from its environment."""
    config_map = only(manifests, "ConfigMap")
    (volume,) = (volume for volume in pod["volumes"] if "configMap" in volume)
    assert volume["configMap"]["name"] == config_map["metadata"]["name"]
    assert list(config_map["data"]) == ["config.toml"]
    path = tmp_path / "config.toml"
    path.write_text(config_map["data"]["config.toml"], encoding="utf-8")
    return loader.load(path, environment)


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_match_the_kubernetes_schemas(manifests, package, version):
    validate = package("kubernetes_validate")
    for manifest in manifests:
        check_schema(manifest, version, validate)


def test_config_map_is_mounted_at_the_path_that_the_agent_reads(agent, settings, pod):
    assert settings.sinks
    assert volume_of(pod, mount(agent, "/etc/scheduled-events-bridge/config.toml")).keys() == {"name", "configMap"}


def test_state_is_on_the_node_and_owned_by_the_agent_user(pod, agent, settings):
    found = mount(agent, settings.state.directory)
    assert not found.get("readOnly")
    volume = volume_of(pod, found)
    # not /mnt, which is the temporary disk
    assert volume["hostPath"] == {"path": "/var/lib/scheduled-events-bridge", "type": "DirectoryOrCreate"}
    assert found["mountPath"] == settings.state.directory
    (owner,) = pod["initContainers"]
    assert mount(owner, settings.state.directory)["name"] == volume["name"]
    user = pod["securityContext"]["runAsUser"]
    assert f'path = "{settings.state.directory}"' in owner["command"][-1]
    assert f"os.chown(path, {user}, {pod['securityContext']['runAsGroup']})" in owner["command"][-1]
    compile(owner["command"][-1], "command", "exec")
    assert owner["workingDir"] == "/"


@pytest.fixture
def own_overlay(kustomized, tmp_path):
    """Return a function that builds a custom overlay from a kustomization.yaml and a config.toml."""
    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    directory = tmp_path / "kubernetes/overlays/own"
    directory.mkdir()
    (directory / "config.toml").write_text('[[sinks]]\ntype = "stdout"\nname = "own"\n')

    def built(text):
        (directory / "kustomization.yaml").write_text(text)
        return kustomized(directory)

    return built


def test_documented_overlay_replaces_the_configuration_and_the_image(own_overlay):
    [recipe] = doc_pages.blocks(doc_pages.page("deploy/kubernetes/README.md"), "yaml")
    manifests = own_overlay(recipe.text)
    config = only(manifests, "ConfigMap")
    assert 'name = "own"' in config["data"]["config.toml"]
    pod = only(manifests, "DaemonSet")["spec"]["template"]["spec"]
    assert [each["configMap"]["name"] for each in pod["volumes"] if "configMap" in each] == [config["metadata"]["name"]]
    images = {each["image"] for each in pod["containers"] + pod["initContainers"]}
    assert images == {"registry.contoso.net/scheduled-events-bridge:0.1.0"}


def test_termination_grace_period_exceeds_the_stop_grace_period(pod, settings):
    assert pod["terminationGracePeriodSeconds"] > settings.stop_grace_seconds + 1


def test_rolling_update_never_runs_two_agents_on_one_node(manifests):
    strategy = only(manifests, "DaemonSet")["spec"]["updateStrategy"]
    assert strategy["type"] == "RollingUpdate"
    assert strategy["rollingUpdate"]["maxSurge"] == 0
    assert strategy["rollingUpdate"]["maxUnavailable"]


@pytest.mark.parametrize("build", ["overlays/drain"], scope="module", indirect=True)
def test_drain_role_grants_exactly_the_required_permissions(manifests):
    role, binding = only(manifests, "ClusterRole"), only(manifests, "ClusterRoleBinding")
    granted = [(resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]]
    assert sorted(granted) == sorted(RIGHTS)
    assert {group for rule in role["rules"] for group in rule["apiGroups"]} == {""}
    account = only(manifests, "ServiceAccount")["metadata"]
    assert binding["roleRef"] == {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "ClusterRole",
        "name": role["metadata"]["name"],
    }
    subject = {"kind": "ServiceAccount", "name": account["name"], "namespace": account["namespace"]}
    assert binding["subjects"] == [subject]


def test_containers_are_confined_and_the_agent_is_not_root(pod, agent):
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"] + pod["initContainers"]:
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True, container["name"]
        assert context["allowPrivilegeEscalation"] is False, container["name"]
        assert context["capabilities"]["drop"] == ["ALL"], container["name"]
        assert not context.get("privileged"), container["name"]
        assert set(container["resources"]["limits"]) == {"memory"}, container["name"]
        assert set(container["resources"]["requests"]) == {"cpu", "memory"}, container["name"]
    assert "add" not in agent["securityContext"]["capabilities"]
    assert "runAsUser" not in agent["securityContext"]
    (owner,) = pod["initContainers"]
    assert sorted(owner["securityContext"]["capabilities"]["add"]) == ["CHOWN", "FOWNER"]


@pytest.fixture
def scrape_job(package):
    (job,) = package("yaml").safe_load((KUBERNETES / "prometheus.yml").read_text())["scrape_configs"]
    return job


def test_prometheus_accepts_the_scrape_job(tool, package, scrape_job, tmp_path):
    """The check omits kubernetes_sd_configs, because Debian builds Prometheus without it."""
    job = {**scrape_job, "static_configs": [{"targets": ["10.244.0.9:9464"]}]}
    del job["kubernetes_sd_configs"]
    path = tmp_path / "prometheus.yml"
    path.write_text(package("yaml").safe_dump({"scrape_configs": [job]}))
    command = [tool("promtool"), "check", "config", "--lint-fatal", str(path)]
    judged = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert judged.returncode == 0, judged.stdout + judged.stderr
