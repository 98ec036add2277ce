"""The drain program of deploy/kubernetes, with a strict API server and as a sink of a running agent."""

import json
import re
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from imds_documents import document, event
from kubernetes_stub import RIGHTS, KubernetesStub

if sys.platform == "win32":
    pytest.skip("the program does not support Windows nodes", allow_module_level=True)

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "deploy" / "kubernetes" / "drain.py"
PAGE = ROOT / "docs" / "howto" / "kubernetes-drain.md"
NODE = "aks-payments-12345678-vmss000004"
EVENT = "C7061BAC-AFDC-4513-B24B-AA5F13A16123"
ANNOTATION = "scheduled-events-bridge/cordoned-for"


@pytest.fixture
def cluster(tmp_path):
    stub = KubernetesStub(tmp_path / "serviceaccount")
    stub.add_node(NODE)
    yield stub
    stub.close()


def in_pod(cluster):
    return {
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": str(cluster.port),
        "NODE_NAME": NODE,
    }


@pytest.fixture
def drain(cluster, tmp_path):
    """Run the program for a record; return its exit code and the last line of standard error."""

    def run(transition, *arguments, kind="Reboot", seconds=900.0, affects="true", events=(), is_known=True, **more):
        fake_status(tmp_path, events, is_known=is_known)
        not_before = datetime.now(timezone.utc) + timedelta(seconds=seconds)
        env = {
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            **in_pod(cluster),
            "SCHEDULED_EVENT_ID": f"0d0f6d2a-{transition}",
            "SCHEDULED_EVENT_DESCRIPTION": "Host maintenance",
            "SCHEDULED_EVENT_TRANSITION": transition,
            "SCHEDULED_EVENT_EVENT_ID": EVENT,
            "SCHEDULED_EVENT_EVENT_TYPE": kind,
            # Azure clears NotBefore when the event starts. The record of an ending contains the last known event.
            "SCHEDULED_EVENT_NOT_BEFORE": f"{not_before:%Y-%m-%dT%H:%M:%SZ}" if transition != "started" else "",
            "SCHEDULED_EVENT_AFFECTS_THIS_VM": affects,
            **more,
        }
        command = [sys.executable, "-I", PROGRAM, "--service-account", cluster.directory, *arguments]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, (done.stderr.splitlines() or [""])[-1]

    return run


def fake_status(directory, events, *, is_known=True):
    """Install a `status --json` command that prints *events* of this VM, or fails if *events* is None."""
    shown = [{"event_id": name, "event_type": kind, "affects_this_vm": True} for name, kind in events or ()]
    report = {"active_event_ids": [name for name, _ in events or ()] if is_known else None, "events": shown}
    answer = f"echo '{json.dumps(report)}'" if events is not None else "exit 1"
    program = directory / "scheduled-events-bridge"
    program.write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o755)


def cordoned_for(cluster):
    """Return whether the node is cordoned, and the event in its annotation."""
    node = cluster.nodes[NODE]
    return bool(node["spec"].get("unschedulable")), node["metadata"].get("annotations", {}).get(ANNOTATION)


def test_drain_cordons_the_node_and_evicts_only_evictable_pods(cluster, drain):
    cluster.add_pod("web", NODE)
    cluster.add_pod("db-0", NODE, "StatefulSet")
    cluster.add_pod("agent", NODE, "DaemonSet")
    cluster.add_pod("kube-proxy", NODE, None, annotations={"kubernetes.io/config.mirror": "x"})
    cluster.add_pod("etl", NODE, "Job", phase="Succeeded")
    cluster.add_pod("debug", NODE, None)
    cluster.add_pod("elsewhere", "another-node")
    assert drain("scheduled") == (0, "")
    assert cordoned_for(cluster) == (True, EVENT)
    assert set(cluster.evictions) == {"web", "db-0"}
    assert cluster.used == RIGHTS - {("events", "create")}  # only with --event
    assert "taints" not in cluster.nodes[NODE]["spec"]
    assert drain("started", "--force") == (0, "")
    assert set(cluster.evictions) == {"web", "db-0", "debug"}


def test_cordon_only_evicts_no_pods(cluster, drain):
    cluster.add_pod("web", NODE)
    assert drain("scheduled", "--cordon-only") == (0, "")
    assert drain("started", "--cordon-only") == (0, "")
    assert cordoned_for(cluster) == (True, EVENT)
    assert cluster.evictions == {}
    assert drain("completed", "--cordon-only") == (0, "")
    assert cordoned_for(cluster) == (False, None)


def taints(cluster):
    return [f"{each['key']}={each['value']}:{each['effect']}" for each in cluster.nodes[NODE]["spec"].get("taints", [])]


@pytest.mark.parametrize("is_cordoned", [False, True], ids=["schedulable", "cordoned by someone else"])
def test_taint_has_the_event_type_and_is_removed_after_the_last_event(cluster, drain, is_cordoned):
    cluster.nodes[NODE]["spec"] = {
        "taints": [{"key": "sku", "value": "gpu", "effect": "NoSchedule"}],
        **({"unschedulable": True} if is_cordoned else {}),
    }
    cluster.conflicts = 2
    assert drain("scheduled", "--taint") == (0, "")
    assert drain("started", "--taint", kind="Redeploy") == (0, "")
    assert taints(cluster) == ["sku=gpu:NoSchedule", "scheduled-events-bridge/event=Reboot:NoSchedule"]
    assert drain("completed", "--taint", events=[("another", "Redeploy")]) == (0, "")
    assert len(taints(cluster)) == 2
    assert drain("completed") == (0, "")  # also without the option, because the configuration may have changed
    assert taints(cluster) == ["sku=gpu:NoSchedule"]
    assert cordoned_for(cluster) == (is_cordoned, None)


def test_each_record_creates_one_kubernetes_event(cluster, drain):
    for transition in ("scheduled", "scheduled", "started", "completed"):
        assert drain(transition, "--event") == (0, "")
    assert drain("started", "--event", kind="Freeze", SCHEDULED_EVENT_ID="freeze") == (0, "")
    assert drain("scheduled", "--event", affects="false", SCHEDULED_EVENT_ID="another-vm") == (0, "")
    events = cluster.events.values()
    assert [(each["type"], each["reason"]) for each in events] == [
        ("Warning", "RebootScheduled"),
        ("Warning", "RebootStarted"),
        ("Normal", "RebootCompleted"),
        ("Warning", "FreezeStarted"),
    ]
    scheduled, _, completed, _ = [each["message"] for each in events]
    assert re.fullmatch(rf"Azure scheduled event {EVENT}: Reboot scheduled, not before \S+Z\. Host.*", scheduled)
    assert completed.startswith(f"Azure scheduled event {EVENT}: Reboot completed. Host")


def test_drain_continues_if_the_api_rejects_the_kubernetes_event(cluster, drain):
    cluster.add_pod("web", NODE)
    cluster.rights = RIGHTS - {("events", "create")}
    code, reason = drain("scheduled", "--event")
    assert (code, "No Kubernetes Event was written: " in reason) == (0, True)
    assert list(cluster.evictions) == ["web"]


def test_grace_period_of_pods_is_limited_to_the_notice(cluster, drain):
    cluster.add_pod("slow", NODE, grace=6000)
    cluster.add_pod("quick", NODE, grace=5)
    assert drain("scheduled", seconds=600) == (0, "")
    assert 500 <= cluster.evictions["slow"]["gracePeriodSeconds"] <= 597
    assert "gracePeriodSeconds" not in cluster.evictions["quick"]


def test_pods_under_a_disruption_budget_are_evicted_by_a_later_run(cluster, drain):
    cluster.add_pod("web-1", NODE)
    cluster.add_pod("web-2", NODE)
    cluster.kept.add("web-1")
    code, reason = drain("scheduled", "--wait-seconds", "0")
    assert (code, reason[:47]) == (75, "1 of 2 pods cannot be evicted yet: shop/web-1: ")
    assert "disruption budget" in reason
    assert list(cluster.evictions) == ["web-2"]
    cluster.kept.clear()
    assert drain("scheduled") == (0, "")
    assert list(cluster.evictions) == ["web-2", "web-1"]


def test_terminating_pods_are_reported_and_checked_again_by_a_later_run(cluster, drain):
    cluster.add_pod("web", NODE)
    cluster.lists_until_gone = 3
    assert drain("scheduled", "--wait-seconds", "0") == (75, "1 pods have not ended yet: shop/web.")
    assert drain("scheduled") == (0, "")
    assert [path for method, path, _ in cluster.changes if method == "POST"] == [
        "/api/v1/namespaces/shop/pods/web/eviction"
    ]


def test_now_option_does_not_wait_for_pods_to_terminate(cluster, drain):
    cluster.add_pod("web", NODE, grace=600)
    cluster.lists_until_gone = 1_000
    assert drain("scheduled", "--now", kind="Preempt", seconds=300) == (0, "")
    assert cluster.evictions["web"]["gracePeriodSeconds"] < 300


def test_drain_ends_before_the_event_can_start(cluster, drain):
    cluster.add_pod("web", NODE)
    cluster.kept.add("web")
    code, _ = drain("scheduled", seconds=2)
    assert code == 75


def test_deleted_node_requires_no_drain(cluster, drain):
    cluster.nodes.clear()
    assert drain("scheduled") == (0, "")
    assert drain("completed") == (0, "")
    assert cluster.used == {("nodes", "get")}


def test_rotated_token_is_read_from_its_file(cluster, drain):
    cluster.set_token("token-2")
    assert drain("scheduled") == (0, "")
    assert cluster.refused_tokens == []


def test_rejected_token_is_retried_once_and_exits_75(cluster, drain):
    cluster.set_token("token-2", in_file=False)
    code, reason = drain("scheduled")
    assert (code, "does not accept the token" in reason) == (75, True)
    assert cluster.refused_tokens == ["Bearer token-1"] * 2
    assert "token-1" not in reason


def test_missing_permission_exits_1(cluster, drain):
    right = ("pods", "list")
    cluster.add_pod("web", NODE)
    cluster.rights = RIGHTS - {right}
    code, reason = drain("scheduled")
    assert (code, f'cannot {right[1]} resource "{right[0]}"' in reason) == (1, True)


def test_conflicting_node_updates_are_retried(cluster, drain):
    cluster.conflicts = 2
    assert drain("scheduled") == (0, "")
    assert cordoned_for(cluster) == (True, EVENT)
    cluster.conflicts = 2
    assert drain("completed") == (0, "")
    assert cordoned_for(cluster) == (False, None)
    cluster.conflicts = 1_000
    code, reason = drain("scheduled")
    assert (code, "Other programs changed node" in reason) == (75, True)


def test_node_cordoned_by_someone_else_is_drained_and_stays_cordoned(cluster, drain):
    cluster.nodes[NODE]["spec"]["unschedulable"] = True
    cluster.add_pod("web", NODE)
    assert drain("scheduled") == (0, "")
    assert list(cluster.evictions) == ["web"]
    assert drain("completed") == (0, "")
    assert cordoned_for(cluster) == (True, None)
    assert [method for method, _, _ in cluster.changes] == ["POST"]


def test_node_is_uncordoned_after_the_event(cluster, drain):
    drain("scheduled")
    cluster.nodes[NODE]["metadata"]["annotations"]["of-another-program"] = "kept"
    assert drain("ended") == (0, "")
    assert cordoned_for(cluster) == (False, None)
    assert cluster.nodes[NODE]["metadata"]["annotations"] == {"of-another-program": "kept"}


def test_node_stays_cordoned_until_its_last_event_has_ended(cluster, drain):
    drain("scheduled")
    assert drain("completed", events=[("another", "Redeploy")]) == (0, "")
    assert cordoned_for(cluster) == (True, EVENT)
    assert drain("completed", events=[(EVENT, "Reboot"), ("freeze", "Freeze")]) == (0, "")
    assert cordoned_for(cluster) == (False, None)


@pytest.mark.parametrize(
    ("status", "reason"),
    [({"events": None}, "did not report its events"), ({"is_known": False}, "list of active events is not complete")],
    ids=["no response", "events unknown"],
)
def test_node_stays_cordoned_until_the_agent_reports_all_events(cluster, drain, status, reason):
    drain("scheduled")
    code, message = drain("completed", **status)
    assert (code, reason in message) == (75, True)
    assert cordoned_for(cluster) == (True, EVENT)
    assert drain("completed") == (0, "")
    assert cordoned_for(cluster) == (False, None)


@pytest.mark.parametrize(
    ("transition", "words"), [("scheduled", {"affects": "false"}), ("scheduled", {"kind": "Freeze"}), ("updated", {})]
)
def test_records_that_need_no_drain_cause_no_api_request(cluster, drain, transition, words):
    assert drain(transition, **words) == (0, "")
    assert cluster.used == set()


def test_event_with_unknown_target_exits_1_without_a_drain(cluster, drain):
    code, reason = drain("scheduled", affects="")
    assert (code, "is unknown whether" in reason) == (1, True)
    assert cluster.used == set()


def test_all_pages_of_the_pod_list_are_read(cluster, drain):
    for number in range(7):
        cluster.add_pod(f"web-{number}", NODE)
    cluster.page = 3
    assert drain("scheduled", "--now") == (0, "")
    assert len(cluster.evictions) == 7


def test_api_error_exits_75_for_a_retry(cluster, drain):
    cluster.add_pod("web", NODE)
    cluster.broken = {"list"}
    code, reason = drain("scheduled", "--wait-seconds", "0")
    assert (code, "etcdserver: request timed out" in reason) == (75, True)


def test_unreachable_api_exits_75_for_a_retry(cluster, drain):
    cluster.close()
    code, reason = drain("scheduled")
    assert (code, "No response from the API" in reason) == (75, True)


def test_token_is_not_sent_to_a_server_with_an_untrusted_certificate(cluster, drain, tmp_path):
    other = KubernetesStub(tmp_path / "other")
    other.close()
    (cluster.directory / "ca.crt").write_bytes((other.directory / "ca.crt").read_bytes())
    code, reason = drain("scheduled")
    assert (code, "certificate verify failed" in reason) == (75, True)
    assert cluster.refused_tokens == []
    assert cluster.used == set()


def test_test_record_is_a_dry_run(cluster, drain):
    cluster.add_pod("web", NODE)
    assert drain("test") == (0, "The program would evict 1 pods. Nothing was changed.")
    assert cluster.changes == []


@pytest.mark.parametrize("missing", ["KUBERNETES_SERVICE_HOST", "NODE_NAME"])
def test_missing_environment_variable_is_named(drain, missing):
    code, reason = drain("scheduled", **{missing: ""})
    assert (code, f"${missing}" in reason) == (1, True)


def test_documented_tables_drain_and_uncordon_the_node(agent, imds, cluster, tmp_path):
    [tables] = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    program = f'"{sys.executable}", "-I", "{PROGRAM}", "--service-account", "{cluster.directory}"'
    shown = '"python3", "-I", "/opt/scheduled-events-bridge/drain.py"'
    assert tables.count(shown) == 2
    own = tmp_path / "scheduled-events-bridge"
    own.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m bridge "$@"\n')
    own.chmod(0o755)
    agent.env.update(
        in_pod(cluster), PATH=f"{tmp_path}:/usr/bin:/bin", SCHEDULED_EVENTS_BRIDGE_CONFIG=str(agent.config)
    )
    imds.identity = (200, b'{"name": "vm_0", "vmId": "AAAA"}')
    agent.configure(imds.url, tables.replace(shown, program))
    imds.body = b'{"DocumentIncarnation": 1, "Events": []}'
    agent.start()
    # Without a stored document, the agent does not know all events for five minutes.
    imds.wait_for_polls(2)
    assert agent.stop() == 0
    agent.start()
    cluster.add_pod("web", NODE)
    reboot, eviction = event("r", "Started", event_type="Reboot"), event("p", event_type="Preempt")
    imds.show(document(2, reboot))
    agent.wait_for(lambda: "web" in cluster.evictions)
    cluster.add_pod("late", NODE)
    imds.show(document(3, reboot, eviction))
    agent.wait_for(lambda: "late" in cluster.evictions)
    imds.show(document(4, eviction), polls=4)
    assert cordoned_for(cluster) == (True, "r")
    imds.show(document(5))
    agent.wait_for(lambda: cordoned_for(cluster) == (False, None))
    assert agent.stop() == 0


@pytest.mark.parametrize("spare", [(), ("--spare", "")])
def test_recommendation_neither_drains_a_node_nor_keeps_it_cordoned(cluster, drain, spare):
    risk = "SpotRebalanceRecommendation"
    assert drain("scheduled", *spare, kind=risk) == (0, "")
    assert cordoned_for(cluster) == (False, None)
    assert drain("scheduled", *spare) == (0, "")
    assert drain("completed", *spare, events=[("R", risk)]) == (0, "")
    assert cordoned_for(cluster) == (False, None)
