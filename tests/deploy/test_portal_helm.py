"""The chart of the portal: linted, validated against Kubernetes schemas, and compared with the kustomizations."""

import json
from pathlib import Path

import pytest
from kubernetes_manifests import VERSIONS, check_schema, only

pytestmark = pytest.mark.deploy

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "scheduled-events-portal"
KUBERNETES = DEPLOY / "portal" / "kubernetes"
NAME = "scheduled-events-portal"
BASE = {"portalToml": (KUBERNETES / "base/portal.toml").read_text()}
LOAD_BALANCER = {
    "type": "LoadBalancer",
    "port": 443,
    "annotations": {"service.beta.kubernetes.io/azure-load-balancer-internal": "true"},
}
#: A kustomization, and the values of the chart that give the same result.
SAME = {
    "base": BASE,
    "overlays/ingress": {**BASE, "ingress": {"enabled": True}},
    "overlays/tls": {
        "portalToml": (KUBERNETES / "overlays/tls/portal.toml").read_text(),
        "tlsSecretName": "scheduled-events-portal-tls",
        "service": LOAD_BALANCER,
    },
}
POSTGRESQL = {"portalToml": '[database]\nurl = "postgresql://portal@db/portal"\n', "replicas": 3}
EVERYTHING = {
    **POSTGRESQL,
    "image": {"digest": f"sha256:{'a' * 64}"},
    "imagePullSecrets": [{"name": "pull"}],
    "podMonitor": {"enabled": True},
    "ingress": {"enabled": True, "host": "ops.example.org"},
}


@pytest.fixture(scope="module")
def with_values(helm, tmp_path_factory):
    """Return a function that runs helm with *values*."""
    path = tmp_path_factory.mktemp("values") / "values.json"

    def run(*arguments, values):
        path.write_text(json.dumps(values))
        return helm(*arguments, "--values", path)

    return run


@pytest.fixture(scope="module")
def rendered(with_values, package):
    """Return the manifests for *values*."""

    def render(values):
        done = with_values("template", NAME, CHART, "--namespace", NAME, values=values)
        assert (done.returncode, done.stderr) == (0, "")
        return [each for each in package("yaml").safe_load_all(done.stdout) if each]

    return render


def substance(manifests):
    """Return *manifests* by kind without the Namespace, generated names, and labels."""
    found = {}
    for manifest in json.loads(json.dumps(manifests)):
        manifest["metadata"].pop("labels", None)
        spec = manifest.get("spec", {})
        spec.pop("selector", None)
        spec.pop("podSelector", None)
        if manifest["kind"] == "ConfigMap":
            manifest["metadata"]["name"] = "config"
            manifest["data"] = {name: text.strip() for name, text in manifest["data"].items()}
        if manifest["kind"] == "StatefulSet":
            spec["template"].pop("metadata")
            for claim in spec["volumeClaimTemplates"]:
                claim["metadata"].pop("labels", None)
            pod = spec["template"]["spec"]
            for volume in (each for each in pod["volumes"] if "configMap" in each):
                volume["configMap"]["name"] = "config"
            for listed in (pod["containers"][0]["volumeMounts"], pod["volumes"]):
                listed.sort(key=lambda each: each["name"])
        found[manifest["kind"]] = manifest
    found.pop("Namespace", None)
    return found


@pytest.mark.parametrize("name", SAME)
def test_chart_creates_the_same_resources_as_kustomize(rendered, kustomized, name):
    ours, theirs = substance(rendered(SAME[name])), substance(kustomized(KUBERNETES / name))
    assert ours.keys() == theirs.keys()
    for kind, manifest in theirs.items():
        assert ours[kind] == manifest


@pytest.mark.parametrize("values", [*SAME.values(), EVERYTHING], ids=[*SAME, "everything"])
def test_helm_lint_has_no_findings(with_values, values):
    done = with_values("lint", "--strict", CHART, values=values)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_match_the_kubernetes_schemas(rendered, package, version):
    validate = package("kubernetes_validate")
    for values in (*SAME.values(), EVERYTHING):
        for manifest in rendered(values):
            if manifest["kind"] != "PodMonitor":
                check_schema(manifest, version, validate)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({}, "portalToml is empty"),
        ({**BASE, "replicas": 2}, "SQLite allows only one process"),
        ({**BASE, "portaltoml": ""}, "portaltoml"),
        ({**BASE, "storage": "big"}, "storage"),
        ({**BASE, "image": {"digest": "0123"}}, "digest"),
        ({**BASE, "service": {"type": "NodePort"}}, "type"),
    ],
    ids=str,
)
def test_wrong_values_are_rejected_with_the_reason(with_values, values, named):
    done = with_values("template", NAME, CHART, values=values)
    assert done.returncode != 0
    assert named in done.stderr


def test_postgresql_allows_replicas_and_opens_its_port(rendered):
    manifests = rendered(POSTGRESQL)
    assert only(manifests, "StatefulSet")["spec"]["replicas"] == 3
    ports = only(manifests, "NetworkPolicy")["spec"]["egress"][1]["ports"]
    assert ports == [{"port": 443}, {"port": 5432}]
