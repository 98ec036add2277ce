"""The chart: linted, judged by the schemas of Kubernetes, and compared with what kustomize makes of the same."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import doc_pages
import pytest
from kubernetes_manifests import only

from bridge.config.loader import load, read

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.deploy

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "scheduled-events-bridge"
KUBERNETES = DEPLOY / "kubernetes"
NAME = "scheduled-events-bridge"
VERSIONS = ("1.29", "1.31", "1.33", "1.35")
POD = "app.kubernetes.io"
EVENT_HUBS = tomllib.loads((KUBERNETES / "overlays/event-hubs/config.toml").read_text())
#: A kustomization, and the values of the chart that are to come to the same.
SAME = {
    "base": {},
    "overlays/host-network": {"hostNetwork": True},
    "overlays/event-hubs": {"config": EVENT_HUBS},
    "overlays/drain": {"drain": {"enabled": True}},
}
#: Values that use all that the chart knows.
EVERYTHING = {
    "drain": {"enabled": True, "arguments": ["--force"]},
    "imagePullSecrets": [{"name": "pull"}],
    "image": {"pullPolicy": "Always", "digest": f"sha256:{'a' * 64}"},
    "podAnnotations": {"a": "b"},
    "podLabels": {"team": "sre"},
    "serviceAccount": {"annotations": {"azure.workload.identity/client-id": "0"}},
    "maxUnavailable": 1,
}
#: The fields of a PodMonitor, as the CustomResourceDefinition of Prometheus Operator 0.91 has them, that may be used.
POD_MONITOR = {"jobLabel": str, "selector": dict, "podMetricsEndpoints": list, "namespaceSelector": dict}
ENDPOINT = {"port": str, "path": str, "interval": str, "scrapeTimeout": str, "relabelings": list}
RELABELING = {
    "action": str,
    "regex": str,
    "replacement": str,
    "separator": str,
    "sourceLabels": list,
    "targetLabel": str,
}


@pytest.fixture(scope="module")
def helm(tool, tmp_path_factory):
    """Run helm with a home of its own; return how it ended."""
    home = tmp_path_factory.mktemp("helm")

    def run(*arguments):
        command = [tool("helm"), *map(str, arguments)]
        env = {"HOME": str(home), "PATH": "/usr/bin:/bin", "KUBECONFIG": str(home / "none")}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)

    return run


@pytest.fixture(scope="module")
def rendered(helm, package, tmp_path_factory):
    """Return what the chart makes of values, or how helm ended where it refuses."""

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
    """Return *manifests* by kind without names and labels that each tool makes in its own way, nor the Namespace."""
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
    """Take away the labels and annotations, and see that there was nothing else but a name and a namespace."""
    for key in ("labels", "annotations", "creationTimestamp"):
        metadata.pop(key, None)
    assert set(metadata) <= {"name", "namespace"}


@pytest.mark.parametrize("name", SAME)
def test_chart_makes_what_kustomize_makes(rendered, kustomized, name):
    ours, theirs = substance(rendered(SAME[name])), substance(kustomized(KUBERNETES / name))
    assert ours.keys() == theirs.keys()
    for kind, manifest in theirs.items():
        assert ours[kind] == manifest


def test_pods_bear_the_labels_of_kustomize_and_those_that_they_are_selected_by(rendered, kustomized):
    values = {"podLabels": {"team": "sre", f"{POD}/name": "other"}}
    chart, theirs = (only(each, "DaemonSet")["spec"] for each in (rendered(values), kustomized(KUBERNETES / "base")))
    labels = chart["template"]["metadata"]["labels"]
    assert theirs["template"]["metadata"]["labels"].items() <= labels.items()
    assert chart["selector"]["matchLabels"].items() <= labels.items()
    assert labels["team"] == "sre"


def test_every_kustomization_has_its_values():
    paths = KUBERNETES.rglob("kustomization.yaml")
    assert set(SAME) == {str(path.parent.relative_to(KUBERNETES)) for path in paths}


def test_comparison_sees_a_difference(rendered, kustomized):
    theirs = substance(kustomized(KUBERNETES / "base"))
    for values in (
        {"port": 9465},
        {"tolerations": []},
        {"resources": {"limits": {"memory": "1Gi"}}},
        {"secretName": "other"},
    ):
        assert substance(rendered(values)) != theirs, values


@pytest.mark.parametrize("values", [*SAME.values(), EVERYTHING, {"podMonitor": {"enabled": True}}], ids=str)
def test_chart_is_right_for_helm(helm, tmp_path, values):
    path = tmp_path / "values.json"
    path.write_text(json.dumps(values))
    done = helm("lint", "--strict", CHART, "--values", path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 chart(s) failed" in done.stdout


@pytest.mark.parametrize("kubernetes", [*VERSIONS, "newest"])
def test_every_manifest_is_valid_in_strict_mode(rendered, package, kubernetes):
    validate = package("kubernetes_validate")
    wanted = ".".join(validate.latest_version().split(".")[:2]) if kubernetes == "newest" else kubernetes
    for values in (
        {},
        EVERYTHING,
        {"hostNetwork": True},
        {"priorityClass": {"create": False}, "affinity": {"nodeAffinity": None}},
    ):
        for manifest in rendered(values):
            assert validate.validate(manifest, wanted, strict=True) == wanted


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
def test_schema_refuses_what_is_unknown_or_wrong(rendered, values, named):
    said = rendered(values, refused=True)
    assert "schema" in said
    assert named in said


def test_every_value_is_in_the_schema_with_its_default_and_no_other(package):
    values = package("yaml").safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())

    def compare(value, known, path):
        if known.get("additionalProperties") is False:
            assert set(known["properties"]) - {"global", "claims"} == set(value), path
            for key, inner in value.items():
                compare(inner, known["properties"][key], f"{path}.{key}")

    compare(values, schema, "")


def test_configuration_of_values_is_the_same_as_toml(rendered):
    config = {
        "stop_grace_seconds": 12.5,
        "labels": {"cluster": "payments", "with space": 'a "b" \\ <c> & \n\u2603'},
        "state": {"max_bytes": 268_435_456},
        "approval": {"rules": [{"name": "own", "action": "approve", "event_sources": ["User"]}]},
        "sinks": [
            {"type": "stdout", "name": "one", "event_types": ["Reboot", "Preempt"], "heartbeat": True},
            {"type": "command", "name": "two", "command": ["/bin/true"], "environment": {"A": "1"}},
        ],
    }
    written = tomllib.loads(config_of(rendered({"config": config})))
    assert written == config
    assert [sink.name for sink in read(written).sinks] == ["one", "two"]


def test_key_without_a_value_is_refused_because_toml_has_none(rendered):
    said = rendered({"config": {"sinks": [{"type": "stdout", "event_types": None}]}}, refused=True)
    assert "leave the key out" in said


def test_values_of_the_readme_are_taken_and_make_a_configuration(rendered, package):
    [block] = doc_pages.blocks(doc_pages.page("deploy/helm/README.md"), "yaml")
    manifests = rendered(package("yaml").safe_load(block.text))
    [sink] = read(tomllib.loads(config_of(manifests))).sinks
    assert sink.type_name == "eventhubs"
    assert only(manifests, "PodMonitor")


def test_toml_text_goes_in_as_it_is_and_before_the_values(rendered, tmp_path):
    text = '# mine\n[labels]\na = "b"\n\n[[sinks]]\ntype = "stdout"\nname = "own"\n'
    values = {"configToml": text, "config": {"sinks": [{"type": "stdout", "name": "other"}]}}
    assert config_of(rendered(values)) == text
    path = tmp_path / "config.toml"
    path.write_text(config_of(rendered({**values, "drain": {"enabled": True}})))
    assert [sink.name for sink in load(path).sinks] == ["own", "drain", "leave"]


def test_change_of_the_configuration_rolls_the_agents(rendered):
    def annotation(values):
        return only(rendered(values), "DaemonSet")["spec"]["template"]["metadata"]["annotations"]["checksum/config"]

    assert annotation({}) == annotation({"port": 9465})
    assert annotation({}) != annotation({"config": {"labels": {"a": "b"}}})
    assert annotation({}) == annotation({"podAnnotations": {"checksum/config": "never"}})


def test_stop_that_would_be_a_kill_is_refused(rendered):
    for values in (
        {"config": {"stop_grace_seconds": 29}},
        {"configToml": "stop_grace_seconds = 29.5  # long\n"},
        {"terminationGracePeriodSeconds": 11},
    ):
        assert "terminationGracePeriodSeconds" in rendered(values, refused=True)
    rendered({"config": {"stop_grace_seconds": 28.5}})
    rendered({"config": {"stop_grace_seconds": 29}, "configToml": "stop_grace_seconds = 1"})
    rendered({"config": {"stop_grace_seconds": 0}, "terminationGracePeriodSeconds": 2})


def test_arguments_of_the_drain_go_to_both_of_its_sinks(rendered):
    drain = {"enabled": True, "arguments": ["--spare", "Freeze,Reboot"]}
    sinks = tomllib.loads(config_of(rendered({"drain": drain})))["sinks"]
    commands = [sink["command"][3:] for sink in sinks if sink["type"] == "command"]
    assert commands == [["--spare", "Freeze,Reboot"], ["--now", "--spare", "Freeze,Reboot"]]


def test_release_of_another_name_makes_names_of_its_own_that_fit_together(rendered):
    manifests = rendered({"drain": {"enabled": True}}, release="prod")
    assert {each["metadata"]["name"] for each in manifests} == {f"prod-{NAME}", f"prod-{NAME}-drain"}
    pod = only(manifests, "DaemonSet")["spec"]["template"]["spec"]
    assert (pod["serviceAccountName"], pod["priorityClassName"]) == (f"prod-{NAME}", f"prod-{NAME}")
    assert only(manifests, "ClusterRoleBinding")["subjects"][0]["name"] == f"prod-{NAME}"
    selected = only(manifests, "DaemonSet")["spec"]["selector"]["matchLabels"]
    assert selected == {"app.kubernetes.io/name": NAME, "app.kubernetes.io/instance": "prod"}


def test_image_is_of_the_version_of_this_tree_unless_it_is_said(rendered, package):
    chart = package("yaml").safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == version(NAME)

    def image(values):
        return only(rendered({"image": values}), "DaemonSet")["spec"]["template"]["spec"]["containers"][0]["image"]

    assert image({}) == f"registry.example.net/{NAME}:{version(NAME)}"
    assert image({"repository": "r.io/x", "tag": "2"}) == "r.io/x:2"
    assert image({"repository": "r.io/x", "tag": "2", "digest": f"sha256:{'b' * 64}"}) == f"r.io/x@sha256:{'b' * 64}"


@pytest.fixture
def pod_monitor(rendered):
    def of(**values):
        return only(rendered({"podMonitor": {"enabled": True, **values}}), "PodMonitor")

    return of


def test_pod_monitor_is_off_by_default_and_refused_where_nothing_can_be_scraped(rendered):
    assert not [each for each in rendered() if each["kind"] == "PodMonitor"]
    assert "loopback" in rendered({"podMonitor": {"enabled": True}, "hostNetwork": True}, refused=True)


def test_pod_monitor_has_only_fields_that_the_operator_knows(pod_monitor):
    made = pod_monitor(interval="30s", labels={"release": "prometheus"})
    assert (made["apiVersion"], made["kind"]) == ("monitoring.coreos.com/v1", "PodMonitor")
    assert made["metadata"]["labels"]["release"] == "prometheus"
    [endpoint] = made["spec"]["podMetricsEndpoints"]
    checked = [(made["spec"], POD_MONITOR), (endpoint, ENDPOINT)]
    checked += [(rule, RELABELING) for rule in endpoint["relabelings"]]
    for found, known in checked:
        assert set(found) <= set(known)
        assert all(isinstance(value, known[key]) for key, value in found.items())
    assert re.fullmatch(r"(\d+h)?(\d+m)?(\d+s)?", endpoint["interval"])
    assert pod_monitor(apiVersion="azmonitoring.coreos.com/v1")["apiVersion"] == "azmonitoring.coreos.com/v1"


def test_pod_monitor_finds_the_agents_under_the_names_that_the_rules_go_by(rendered, pod_monitor):
    spec, daemon_set = pod_monitor()["spec"], only(rendered(), "DaemonSet")["spec"]["template"]
    labels, [endpoint] = daemon_set["metadata"]["labels"], spec["podMetricsEndpoints"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    [port] = daemon_set["spec"]["containers"][0]["ports"]
    assert (endpoint["port"], endpoint["path"]) == (port["name"], "/metrics")
    assert f'job="{labels[spec["jobLabel"]]}"' in (DEPLOY / "prometheus" / "rules.yml").read_text()
    assert {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "instance"} in endpoint["relabelings"]


def test_notes_show_commands_for_the_namespace_of_the_release(helm, package, tmp_path):
    chart = shutil.copytree(CHART, tmp_path / NAME)
    notes = (chart / "templates/NOTES.txt").read_text()
    shown = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: notes}\ndata: {text: {{ include "
    (chart / "templates/notes.yaml").write_text(
        f'{{{{ define "notes" }}}}{notes}{{{{ end }}}}\n{shown}"notes" . | toJson }}}}}}\n'
    )
    values = tmp_path / "values.json"
    values.write_text('{"drain": {"enabled": true}}')
    done = helm("template", NAME, chart, "--namespace", "maintenance", "--values", values)
    assert done.returncode == 0, done.stderr
    manifests = [each for each in package("yaml").safe_load_all(done.stdout) if each]
    [text] = [each["data"]["text"] for each in manifests if each["metadata"]["name"] == "notes"]
    commands = re.findall(r"^  kubectl -n (\S+) exec ds/(\S+) -- scheduled-events-bridge (.+)$", text, re.MULTILINE)
    assert {(namespace, name) for namespace, name, _ in commands} == {("maintenance", NAME)}
    assert [words for _, _, words in commands] == ["check-config --connect", "status", "send-test drain"]
    assert "WARNING: image.repository" in text


def test_chart_of_a_release_is_taken_by_helm_and_makes_the_same(helm, checkout, tmp_path):
    spec = importlib.util.spec_from_file_location("release", checkout / ".ci/release.py")
    release = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(release)
    made = tmp_path / release.chart_name(release.version_here())
    release.pack_chart(made, 0)
    assert helm("lint", "--strict", made).returncode == 0
    from_archive, from_tree = (helm("template", NAME, chart, "--namespace", NAME) for chart in (made, CHART))
    assert (from_archive.returncode, from_archive.stdout) == (0, from_tree.stdout), from_archive.stderr


def test_archive_holds_the_whole_chart(helm, tmp_path):
    done = helm("package", CHART, "--destination", tmp_path)
    assert done.returncode == 0, done.stderr
    [archive] = tmp_path.glob("*.tgz")
    assert archive.name == f"{NAME}-{version(NAME)}.tgz"
