"""The chart: linted, validated against Kubernetes schemas, and compared with the kustomizations."""

import json
import sys
from pathlib import Path

import doc_pages
import pytest
from kubernetes_manifests import VERSIONS, check_schema, only

from bridge.config.loader import read

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.deploy

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "scheduled-events-bridge"
KUBERNETES = DEPLOY / "kubernetes"
NAME = "scheduled-events-bridge"
EVENT_HUBS = tomllib.loads((KUBERNETES / "overlays/event-hubs/config.toml").read_text())
#: A kustomization, and the values of the chart that give the same result.
SAME = {
    "base": {},
    "overlays/host-network": {"hostNetwork": True},
    "overlays/event-hubs": {"config": EVENT_HUBS},
    "overlays/drain": {"drain": {"enabled": True}},
}
#: Values that use every feature of the chart.
EVERYTHING = {
    "drain": {"enabled": True, "arguments": ["--force"]},
    "imagePullSecrets": [{"name": "pull"}],
    "image": {"pullPolicy": "Always", "digest": f"sha256:{'a' * 64}"},
    "podAnnotations": {"a": "b"},
    "podLabels": {"team": "sre"},
    "serviceAccount": {"annotations": {"azure.workload.identity/client-id": "0"}},
    "maxUnavailable": 1,
}


@pytest.fixture(scope="module")
def rendered(helm, package, tmp_path_factory):
    """Return a function that renders the chart with *values*, or returns the error of helm if *refused*."""

    def render(values=None, *, release=NAME, refused=False):
        path = tmp_path_factory.mktemp("values") / "values.json"
        path.write_text(json.dumps(values or {}))
        done = helm("template", release, CHART, "--namespace", NAME, "--values", path)
        if refused:
            assert done.returncode != 0, done.stdout
            return done.stderr
        assert (done.returncode, done.stderr) == (0, "")
        return [each for each in package("yaml").safe_load_all(done.stdout) if each]

    return render


def config_of(manifests):
    """Return the configuration of the ConfigMap."""
    return only(manifests, "ConfigMap")["data"]["config.toml"]


def substance(manifests):
    """Return *manifests* by kind without the Namespace, generated names, and labels."""
    found = {}
    for manifest in json.loads(json.dumps(manifests)):
        without_labels(manifest["metadata"])
        if manifest["kind"] == "ConfigMap":
            manifest["metadata"]["name"] = "config"
            manifest["data"] = {"config.toml": tomllib.loads(manifest["data"]["config.toml"])}
        if manifest["kind"] == "DaemonSet":
            of_daemon_set(manifest["spec"])
        assert manifest["kind"] not in found
        found[manifest["kind"]] = manifest
    found.pop("Namespace", None)
    return found


def of_daemon_set(spec):
    spec.pop("selector")
    without_labels(spec["template"].pop("metadata"))
    pod = spec["template"]["spec"]
    [agent] = pod["containers"]
    for volume in pod["volumes"]:
        if "configMap" in volume:
            volume["configMap"]["name"] = "config"
    for listed in (agent["env"], agent["volumeMounts"], pod["volumes"]):
        listed.sort(key=lambda each: each["name"])


def without_labels(metadata):
    """Remove the labels and annotations, and check that only a name and a namespace remain."""
    for key in ("labels", "annotations", "creationTimestamp"):
        metadata.pop(key, None)
    assert set(metadata) <= {"name", "namespace"}


@pytest.mark.parametrize("name", SAME)
def test_chart_creates_the_same_resources_as_kustomize(rendered, kustomized, name):
    ours, theirs = substance(rendered(SAME[name])), substance(kustomized(KUBERNETES / name))
    assert ours.keys() == theirs.keys()
    for kind, manifest in theirs.items():
        assert ours[kind] == manifest


@pytest.mark.parametrize("values", [*SAME.values(), EVERYTHING, {"podMonitor": {"enabled": True}}], ids=str)
def test_helm_lint_has_no_findings(helm, tmp_path, values):
    path = tmp_path / "values.json"
    path.write_text(json.dumps(values))
    done = helm("lint", "--strict", CHART, "--values", path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 chart(s) failed" in done.stdout


@pytest.mark.parametrize("kubernetes", VERSIONS)
def test_manifests_match_the_kubernetes_schemas(rendered, package, kubernetes):
    validate = package("kubernetes_validate")
    for values in (
        {},
        EVERYTHING,
        {"hostNetwork": True},
        {"priorityClass": {"create": False}, "affinity": {"nodeAffinity": None}},
    ):
        for manifest in rendered(values):
            check_schema(manifest, kubernetes, validate)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"imge": {}}, "imge"),
        ({"image": {"repo": "x"}}, "repo"),
        ({"image": {"tag": 1}}, "tag"),
        ({"image": {"digest": "0123"}}, "digest"),
        ({"port": "9464"}, "port"),
        ({"port": 0}, "port"),
        ({"hostNetwork": "yes"}, "hostNetwork"),
        ({"stateDirectory": "state"}, "stateDirectory"),
        ({"config": "[[sinks]]"}, "config"),
        ({"config": {"sink": []}}, "sink"),
        ({"config": {"sinks": {"type": "stdout"}}}, "sinks"),
        ({"config": {"sinks": [{"name": "typeless"}]}}, "type"),
        ({"config": {"sinks": [{"type": "webhook", "urll": "https://x"}]}}, "urll"),
        ({"config": {"sinks": [{"type": "file", "path": 7}]}}, "path"),
        ({"config": {"imds": {"poll_interval_seconds": "1"}}}, "poll_interval_seconds"),
        ({"config": {"approval": {"rules": [{"name": "own", "act": "now"}]}}}, "act"),
        ({"config": {"labels": {"a": 1}}}, "labels"),
        ({"configToml": {}}, "configToml"),
        ({"resources": {"limit": {}}}, "limit"),
        ({"tolerations": {}}, "tolerations"),
        ({"maxUnavailable": "0%"}, "maxUnavailable"),
        ({"podMonitor": {"enabled": 1}}, "enabled"),
        ({"podMonitor": {"apiVersion": "v1"}}, "apiVersion"),
        ({"drain": {"enable": True}}, "enable"),
        ({"drain": {"arguments": "--force"}}, "arguments"),
        ({"priorityClass": {"value": 2_000_000_000}}, "value"),
    ],
)
def test_schema_rejects_unknown_or_wrong_values(rendered, values, named):
    said = rendered(values, refused=True)
    assert "schema" in said
    assert named in said


def test_documented_values_render_a_valid_configuration(rendered, package):
    [block] = doc_pages.blocks(doc_pages.page("deploy/helm/README.md"), "yaml")
    manifests = rendered(package("yaml").safe_load(block.text))
    [sink] = read(tomllib.loads(config_of(manifests))).sinks
    assert sink.type_name == "eventhubs"
    assert only(manifests, "PodMonitor")


def test_too_short_termination_grace_period_is_rejected(rendered):
    for values in (
        {"config": {"stop_grace_seconds": 29}},
        {"configToml": "stop_grace_seconds = 29.5  # long\n"},
        {"terminationGracePeriodSeconds": 11},
    ):
        assert "terminationGracePeriodSeconds" in rendered(values, refused=True)
    rendered({"config": {"stop_grace_seconds": 28.5}})
    rendered({"config": {"stop_grace_seconds": 29}, "configToml": "stop_grace_seconds = 1"})
    rendered({"config": {"stop_grace_seconds": 0}, "terminationGracePeriodSeconds": 2})


def test_pod_monitor_is_off_by_default_and_rejected_with_the_host_network(rendered):
    assert not [each for each in rendered() if each["kind"] == "PodMonitor"]
    assert "loopback" in rendered({"podMonitor": {"enabled": True}, "hostNetwork": True}, refused=True)
