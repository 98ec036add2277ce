"""The portal's manifests: built by kustomize, and checked against the Kubernetes schemas and their configuration."""

import re
from pathlib import Path

import pytest
from kubernetes_manifests import VERSIONS, check_schema, mount, only, volume_of

from bridge.portal.setting_checks import address_of
from bridge.portal.settings import load

pytestmark = pytest.mark.deploy

KUBERNETES = Path(__file__).parents[2] / "deploy/portal/kubernetes"
BUILDS = sorted(str(path.parent.relative_to(KUBERNETES)) for path in KUBERNETES.rglob("kustomization.yaml"))
NAME = "scheduled-events-portal"
STATE = f"/var/lib/{NAME}"


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
    return only(manifests, "StatefulSet")["spec"]["template"]["spec"]


@pytest.fixture
def portal(pod):
    (container,) = pod["containers"]
    return container


@pytest.fixture
def settings(manifests, pod, tmp_path):
    """Return the settings from the ConfigMap that the pod mounts."""
    config_map = only(manifests, "ConfigMap")
    (volume,) = (volume for volume in pod["volumes"] if "configMap" in volume)
    assert volume["configMap"]["name"] == config_map["metadata"]["name"]
    assert list(config_map["data"]) == ["portal.toml"]
    path = tmp_path / "portal.toml"
    path.write_text(config_map["data"]["portal.toml"], encoding="utf-8")
    return load(path)


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_match_the_kubernetes_schemas(manifests, package, version):
    validate = package("kubernetes_validate")
    for manifest in manifests:
        check_schema(manifest, version, validate)


def test_config_map_is_mounted_at_the_path_that_the_portal_reads(pod, portal, settings):
    assert portal["args"] == ["portal"]
    assert volume_of(pod, mount(portal, f"/etc/{NAME}/portal.toml")).keys() == {"name", "configMap"}
    assert settings.database.file is None  # so it is in the image's $STATE_DIRECTORY
    dockerfile = (KUBERNETES.parent / "Dockerfile").read_text()
    assert f"STATE_DIRECTORY={STATE} " in dockerfile
    assert volume_of(pod, mount(portal, "/tmp")).keys() == {"name", "emptyDir"}


def test_secrets_are_mounted_as_files_for_the_group_of_the_pod(pod, portal, settings, deploy):
    named = [settings.agents.attested.secret_file, settings.readers.token_file, settings.signing.private_key_file]
    volume = volume_of(pod, mount(portal, named[0]))
    assert volume["secret"] == {"secretName": NAME, "defaultMode": 0o440}
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
    made = re.findall(r"--from-file=([\w.]+)", (deploy / "portal/README.md").read_text())
    assert [Path(name).name for name in named] == made
    assert all(mount(portal, name)["mountPath"] == str(Path(name).parent) for name in named)


def test_probes_use_the_operator_address(portal, settings):
    host, port = address_of(settings.operator.listen)
    assert host == "0.0.0.0"
    for name, path in (("startupProbe", "/healthz"), ("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
        assert portal[name]["httpGet"] == {"path": path, "port": port}, name
    assert {each["name"]: each["containerPort"] for each in portal["ports"]} == {
        "portal": address_of(settings.server.listen)[1],
        "operator": port,
    }


def test_service_exposes_the_portal_but_not_the_operator_port(build, manifests, pod, settings):
    service = only(manifests, "Service")
    (port,) = service["spec"]["ports"]
    assert port["targetPort"] == "portal"
    labels = only(manifests, "StatefulSet")["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    speaks_tls = settings.server.cert_file is not None
    assert speaks_tls == (build == "overlays/tls")
    assert (service["spec"]["type"], port["port"]) == (("LoadBalancer", 443) if speaks_tls else ("ClusterIP", 8443))
    if speaks_tls:
        assert service["spec"]["externalTrafficPolicy"] == "Local"
        internal = "service.beta.kubernetes.io/azure-load-balancer-internal"
        assert service["metadata"]["annotations"] == {internal: "true"}
        (found,) = (each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "tls")
        for name in (settings.server.cert_file, settings.server.key_file):
            assert str(Path(name).parent) == found["mountPath"]
            assert Path(name).name in {"tls.crt", "tls.key"}  # the keys of a Secret of type kubernetes.io/tls
        assert volume_of(pod, found)["secret"]["defaultMode"] == 0o440


def test_pod_is_confined_and_has_no_kubernetes_api_access(manifests, pod, portal):
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    context = portal["securityContext"]
    assert context["readOnlyRootFilesystem"] is True
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert set(portal["resources"]["limits"]) == {"memory"}
    assert pod["automountServiceAccountToken"] is False
    account = only(manifests, "ServiceAccount")
    assert (account["metadata"]["name"], account["automountServiceAccountToken"]) == (pod["serviceAccountName"], False)
    assert [manifest["kind"] for manifest in manifests if "Role" in manifest["kind"]] == []
