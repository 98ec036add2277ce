"""The portal's manifests: built by kustomize, judged by schemas, and held against their own configuration."""

import re
from pathlib import Path

import pytest
from kubernetes_manifests import mount, only, volume_of

from bridge.portal.settings import address_of, load

pytestmark = pytest.mark.deploy

KUBERNETES = Path(__file__).parents[2] / "deploy/portal/kubernetes"
BUILDS = sorted(str(path.parent.relative_to(KUBERNETES)) for path in KUBERNETES.rglob("kustomization.yaml"))
VERSIONS = ("1.29", "1.31", "1.33", "1.35")
NAME = "scheduled-events-portal"
STATE = f"/var/lib/{NAME}"


@pytest.fixture(scope="module", params=BUILDS)
def build(request):
    """Return the directory of one kustomization."""
    return request.param


@pytest.fixture(scope="module")
def manifests(build, kustomized):
    """Return what the kustomization builds."""
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
    """Return the settings of the ConfigMap that the pod really mounts."""
    config_map = only(manifests, "ConfigMap")
    (volume,) = (volume for volume in pod["volumes"] if "configMap" in volume)
    assert volume["configMap"]["name"] == config_map["metadata"]["name"]
    assert list(config_map["data"]) == ["portal.toml"]
    path = tmp_path / "portal.toml"
    path.write_text(config_map["data"]["portal.toml"], encoding="utf-8")
    return load(path)


def test_there_are_the_base_and_its_overlays_and_the_readme_names_each(deploy):
    text = (deploy / "portal/README.md").read_text()
    assert {"base", "overlays/ingress", "overlays/tls"} == set(BUILDS)
    assert set(re.findall(r"\]\(kubernetes/([\w/-]+)/kustomization\.yaml\)", text)) == set(BUILDS)


@pytest.mark.parametrize("version", [*VERSIONS, "newest"])
def test_every_manifest_is_valid_in_strict_mode(manifests, package, version):
    validate = package("kubernetes_validate")
    wanted = ".".join(validate.latest_version().split(".")[:2]) if version == "newest" else version
    for manifest in manifests:
        assert validate.validate(manifest, wanted, strict=True) == wanted


def test_everything_that_has_a_namespace_is_in_the_one_that_is_made_and_restricted(manifests, deploy):
    made = only(manifests, "Namespace")["metadata"]
    assert made["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert f"kubectl -n {made['name']} " in (deploy / "portal/README.md").read_text()
    for manifest in manifests:
        if manifest["kind"] != "Namespace":
            assert manifest["metadata"]["namespace"] == made["name"]


def test_one_pod_has_the_database_on_a_volume_of_its_own(manifests, portal):
    spec = only(manifests, "StatefulSet")["spec"]
    assert spec["replicas"] == 1
    (claim,) = spec["volumeClaimTemplates"]
    assert claim["metadata"]["name"] == mount(portal, STATE)["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOncePod"]
    assert spec["serviceName"] == only(manifests, "Service")["metadata"]["name"]


def test_configuration_is_read_from_where_the_portal_looks(pod, portal, settings):
    assert portal["args"] == ["portal"]
    assert volume_of(pod, mount(portal, f"/etc/{NAME}/portal.toml")).keys() == {"name", "configMap"}
    assert settings.database.file is None  # so it is in the image's $STATE_DIRECTORY
    dockerfile = (KUBERNETES.parent / "Dockerfile").read_text()
    assert f"STATE_DIRECTORY={STATE} " in dockerfile
    assert volume_of(pod, mount(portal, "/tmp")).keys() == {"name", "emptyDir"}


def test_secrets_are_files_that_the_pod_has_for_its_group_alone(pod, portal, settings, deploy):
    named = [settings.agents.attested.secret_file, settings.readers.token_file, settings.signing.private_key_file]
    volume = volume_of(pod, mount(portal, named[0]))
    assert volume["secret"] == {"secretName": NAME, "defaultMode": 0o440}
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
    made = re.findall(r"--from-file=([\w.]+)", (deploy / "portal/README.md").read_text())
    assert [Path(name).name for name in named] == made
    assert all(mount(portal, name)["mountPath"] == str(Path(name).parent) for name in named)


def test_probes_ask_where_the_portal_listens(portal, settings):
    host, port = address_of(settings.operator.listen)
    assert host == "0.0.0.0"
    for name, path in (("startupProbe", "/healthz"), ("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
        assert portal[name]["httpGet"] == {"path": path, "port": port}, name
    assert {each["name"]: each["containerPort"] for each in portal["ports"]} == {
        "portal": address_of(settings.server.listen)[1],
        "operator": port,
    }


def test_service_leads_to_the_portal_and_never_to_the_operators_port(build, manifests, pod, settings):
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
            assert Path(name).name in {"tls.crt", "tls.key"}  # as a Secret of the type kubernetes.io/tls has them
        assert volume_of(pod, found)["secret"]["defaultMode"] == 0o440


@pytest.mark.parametrize("build", ["overlays/ingress"], scope="module", indirect=True)
def test_ingress_holds_what_agents_hold_and_keeps_no_stream(manifests):
    ingress, service = only(manifests, "Ingress"), only(manifests, "Service")
    said = {key.rpartition("/")[2]: value for key, value in ingress["metadata"]["annotations"].items()}
    assert said["proxy-buffering"] == "off"
    assert int(said["proxy-read-timeout"]) > 600  # the longest that an agent asks to wait
    assert said["proxy-body-size"] == "1m"
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    backend = path["backend"]["service"]
    assert (backend["name"], backend["port"]["name"]) == (
        service["metadata"]["name"],
        service["spec"]["ports"][0]["name"],
    )
    assert [rule["host"]] == ingress["spec"]["tls"][0]["hosts"]


def test_network_policy_opens_what_is_needed_and_never_the_metadata_service(manifests, settings):
    spec = only(manifests, "NetworkPolicy")["spec"]
    assert sorted(spec["policyTypes"]) == ["Egress", "Ingress"]
    everybody, prometheus = spec["ingress"]
    assert everybody == {"ports": [{"port": address_of(settings.server.listen)[1]}]}
    assert prometheus["ports"] == [{"port": address_of(settings.operator.listen)[1]}]
    assert prometheus["from"]
    names, authorities = spec["egress"]
    assert {each["port"] for each in names["ports"]} == {53}
    assert [each["port"] for each in authorities["ports"]] == [443]
    (block,) = authorities["to"]
    assert block["ipBlock"]["except"] == ["169.254.169.254/32"]
    assert all(url.startswith("https://") for url in settings.agents.attested.intermediates_urls)


def test_pod_is_confined_and_has_no_right_to_the_api(manifests, pod, portal):
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


def test_pod_runs_as_the_user_of_the_image_that_the_kustomization_names(pod, portal):
    dockerfile = (KUBERNETES.parent / "Dockerfile").read_text()
    ((user, group),) = re.findall(r"^USER (\d+):(\d+)$", dockerfile, re.MULTILINE)
    assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsGroup"]) == (int(user), int(group))
    assert re.fullmatch(r"registry\.example\.net/scheduled-events-portal:\d+\.\d+\.\d+", portal["image"])


def test_a_migration_is_waited_for_and_a_stop_has_its_time(pod, portal):
    assert portal["startupProbe"]["periodSeconds"] * portal["startupProbe"]["failureThreshold"] >= 120
    assert portal["livenessProbe"]["periodSeconds"] * portal["livenessProbe"]["failureThreshold"] >= 120
    assert pod["terminationGracePeriodSeconds"] > 5
