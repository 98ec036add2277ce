# ruff: noqa: INP001
"""Drain this pod's node before a scheduled event, and uncordon it afterward.

The `--cordon-only` option leaves the pods on the node. `--taint` adds a taint to the node, and `--event` writes a
Kubernetes Event for each record.

Two `command` sinks run this program (see docs/howto/kubernetes-drain.md). The program calls the Kubernetes API with the
pod's service account and needs only the Python standard library. It is safe to run the program again at any time.

Exit code 75 requests a retry, for example if a PodDisruptionBudget prevents an eviction or the API does not respond.
Exit code 1 means that someone must fix a problem. In both cases, `outbox list` shows the last line of standard error.

The program uncordons only nodes that have its annotation, and removes only its own taints.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

ANNOTATION = "scheduled-events-bridge/cordoned-for"
TAINT = "scheduled-events-bridge/event"
COMPONENT = "scheduled-events-bridge"
#: Kubernetes requires this namespace for an Event about a node, because a node has no namespace.
EVENT_NAMESPACE = "default"
#: The message of an Event has at most 1,024 bytes.
MESSAGE_CHARACTERS = 1000
#: The value of a taint has at most 63 characters.
VALUE_CHARACTERS = 63
AGAIN_LATER = 75
#: A recommendation never causes a drain, and never keeps a node cordoned.
ADVISORY = frozenset({"SpotRebalanceRecommendation"})
DRAINING = frozenset({"scheduled", "started"})
ENDS = frozenset({"completed", "canceled", "ended"})
PAGE = 250
CONFLICTS = 5
DEFAULT_GRACE_SECONDS = 30
#: The minimum time between the end of the last pod and NotBefore.
MARGIN_SECONDS = 3.0
PAUSE_SECONDS = 1.0
#: The time that one run waits for pods, without and with --now. The sink with --now has a timeout of 25 s.
WAIT_SECONDS, URGENT_WAIT_SECONDS = 60.0, 15.0
STATUS_SECONDS = 20
REQUEST_SECONDS, URGENT_REQUEST_SECONDS = 15.0, 5.0
MOST_NAMES = 3
Json = dict[str, Any]


class Later(Exception):
    """The sink must run the program again later."""


class Failed(Exception):
    """A person must fix the problem."""


class Api:
    """A Kubernetes API client that uses the service account in *directory*."""

    def __init__(self, host: str, port: str, directory: Path, timeout_seconds: float) -> None:
        self._directory = directory
        try:
            context = ssl.create_default_context(cafile=str(directory / "ca.crt"))
        except OSError as error:
            raise Failed(
                f"{directory}/ca.crt cannot be read: {error}. Mount a service account's token there."
            ) from None
        self._connection = http.client.HTTPSConnection(
            host.strip("[]"), int(port), timeout=timeout_seconds, context=context
        )

    def call(
        self, method: str, path: str, body: Json | None = None, kind: str = "application/json"
    ) -> tuple[int, Json]:
        """Return the status and the body of a response.

        Raise Later without a response, or Failed if access is denied.

        Read the token before each request, because Kubernetes rotates the token. Retry after a 401.
        """
        status, answer = self._once(method, path, body, kind)
        if status == HTTPStatus.UNAUTHORIZED:
            status, answer = self._once(method, path, body, kind)
        if status == HTTPStatus.UNAUTHORIZED:
            raise Later(f"The API does not accept the token of the service account: {said(answer)}")
        if status == HTTPStatus.FORBIDDEN and not is_terminating(answer):
            raise Failed(f"The service account has no permission: {said(answer)}")
        return status, answer

    def _once(self, method: str, path: str, body: Json | None, kind: str) -> tuple[int, Json]:
        headers = {"Authorization": f"Bearer {self._token()}", "Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = kind
        text = None if body is None else json.dumps(body)
        try:
            self._connection.request(method, path, body=text, headers=headers)
            response = self._connection.getresponse()
            answer = json.loads(response.read() or b"{}")
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._connection.close()
            raise Later(
                f"No response from the API at {self._connection.host}:{self._connection.port}: {error}"
            ) from None
        return response.status, answer if isinstance(answer, dict) else {}

    def _token(self) -> str:
        try:
            return (self._directory / "token").read_text().strip()
        except OSError as error:
            raise Failed(f"{error.filename} cannot be read: {error.strerror}. Mount a token there.") from None


class Node:
    """The node *name* and its pods."""

    def __init__(self, api: Api, name: str, *, with_bare_pods: bool) -> None:
        self._api = api
        self._path = f"/api/v1/nodes/{quote(name, safe='')}"
        self._name = name
        self._with_bare_pods = with_bare_pods

    def cordon(self, event_id: str, taint: str) -> bool:
        """Cordon the node and set *taint*, unless *taint* is empty.

        Return False if the node no longer exists.
        """

        def change(node: Json, spec: Json, annotations: Json) -> None:
            if not node["spec"].get("unschedulable"):  # otherwise, someone else might have cordoned the node
                spec["unschedulable"] = True
                annotations[ANNOTATION] = event_id or "unknown"
            taints = node["spec"].get("taints") or []
            if taint and not any(each["key"] == TAINT for each in taints):
                spec["taints"] = [*taints, {"key": TAINT, "value": taint, "effect": "NoSchedule"}]

        return self._change(change, "cordon")

    def uncordon(self) -> None:
        """Uncordon the node if this program cordoned it, and remove this program's taint."""

        def change(node: Json, spec: Json, annotations: Json) -> None:
            if ANNOTATION in (node["metadata"].get("annotations") or {}):
                spec["unschedulable"] = None
                annotations[ANNOTATION] = None
            taints = node["spec"].get("taints") or []
            if any(each["key"] == TAINT for each in taints):
                spec["taints"] = [each for each in taints if each["key"] != TAINT]

        self._change(change, "uncordon")

    def _change(self, change: Callable[[Json, Json, Json], None], verb: str) -> bool:
        """Apply *change* to the node. Return False if the node no longer exists.

        Because a patch replaces all taints, it contains the node's resource version. Kubernetes then rejects the patch
        if another program has changed the node in the meantime.
        """
        for _ in range(CONFLICTS):
            node = self._read()
            if node is None:
                return False
            spec: Json = {}
            annotations: Json = {}
            change(node, spec, annotations)
            metadata = {"resourceVersion": node["metadata"]["resourceVersion"], "annotations": annotations}
            if not spec or self._patch({"metadata": metadata, "spec": spec}):
                return True
        raise Later(f"Other programs changed node {self._name} during each attempt to {verb} it.")

    def _read(self) -> Json | None:
        status, node = self._api.call("GET", self._path)
        if status == HTTPStatus.NOT_FOUND:
            return None
        return expect(status, node, f"Node {self._name} cannot be read")

    def _patch(self, body: Json) -> bool:
        """Change the node. Return False if the node has changed since it was read."""
        status, answer = self._api.call("PATCH", self._path, body, "application/merge-patch+json")
        if status == HTTPStatus.CONFLICT:
            return False
        if status != HTTPStatus.NOT_FOUND:  # a deleted node needs no change
            expect(status, answer, f"Node {self._name} cannot be changed")
        return True

    def write_event(self, event: dict[str, str]) -> None:
        """Write a Kubernetes Event for the record. If this fails, print the reason, and continue.

        The name of the Event contains the ID of the record. If the program runs again for the same record, Kubernetes
        rejects the second Event.
        """
        path = f"/api/v1/namespaces/{EVENT_NAMESPACE}/events"
        try:
            status, answer = self._api.call("POST", path, kubernetes_event(self._name, event))
            if status != HTTPStatus.CONFLICT:  # an earlier run has written the Event
                expect(status, answer, "The API rejected the Event")
        except (Later, Failed) as reason:
            sys.stderr.write(f"No Kubernetes Event was written: {reason}\n")

    def pods(self) -> Iterator[Json]:
        """Yield the pods to evict."""
        following = ""
        while True:
            query = {"fieldSelector": f"spec.nodeName={self._name}", "limit": str(PAGE)}
            query |= {"continue": following} if following else {}
            status, answer = self._api.call("GET", f"/api/v1/pods?{urlencode(query)}")
            page = expect(status, answer, f"The pods of node {self._name} cannot be listed")
            yield from (pod for pod in page["items"] if self._is_to_leave(pod))
            following = page.get("metadata", {}).get("continue", "")
            if not following:
                return

    def _is_to_leave(self, pod: Json) -> bool:
        metadata = pod["metadata"]
        if "kubernetes.io/config.mirror" in (metadata.get("annotations") or {}):
            return False  # a static pod of the kubelet
        if pod.get("status", {}).get("phase") in {"Succeeded", "Failed"}:
            return False
        owners = [owner for owner in metadata.get("ownerReferences") or [] if owner.get("controller")]
        if any(owner["kind"] == "DaemonSet" for owner in owners):
            return False  # the DaemonSet would create the pod again immediately
        return bool(owners) or self._with_bare_pods

    def evict(self, pod: Json, seconds_left: float | None) -> str:
        """Evict *pod* within *seconds_left*. Return an error message, or "" on success."""
        metadata = pod["metadata"]
        options: Json = {"preconditions": {"uid": metadata["uid"]}}
        own = pod["spec"].get("terminationGracePeriodSeconds", DEFAULT_GRACE_SECONDS)
        if seconds_left is not None and own > seconds_left:
            options["gracePeriodSeconds"] = max(1, int(seconds_left))
        path = f"/api/v1/namespaces/{quote(metadata['namespace'])}/pods/{quote(metadata['name'])}/eviction"
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
            "deleteOptions": options,
        }
        status, answer = self._api.call("POST", path, body)
        # 404: the pod is gone. 409: a new pod has the same name. 403: the namespace is being deleted (see `call`).
        if status < HTTPStatus.MULTIPLE_CHOICES or status in {403, 404, 409}:
            return ""
        return said(answer) or f"HTTP {status}"


def said(answer: Json) -> str:
    """Return the message of a Kubernetes Status object on one line."""
    return " ".join(str(answer.get("message", "")).split())[:160]


def is_terminating(answer: Json) -> bool:
    """Return whether a 403 response means that the namespace is being deleted."""
    causes = (answer.get("details") or {}).get("causes") or []
    return any(cause.get("reason") == "NamespaceTerminating" for cause in causes)


def expect(status: int, answer: Json, what: str) -> Json:
    """Return *answer* if *status* is a success.

    Raise Later for a temporary error, and Failed otherwise.
    """
    if status < HTTPStatus.MULTIPLE_CHOICES:
        return answer
    sentence = f"{what}: HTTP {status}. {said(answer)}"
    passes = status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in {408, 409, 410, 429}
    raise (Later if passes else Failed)(sentence)


def names(pods: list[Json]) -> str:
    """Return the names of the first *pods*, and the number of other pods."""
    shown = [f"{pod['metadata']['namespace']}/{pod['metadata']['name']}" for pod in pods[:MOST_NAMES]]
    more = len(pods) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def empty(node: Node, not_before: float | None, *, wait_seconds: float, is_urgent: bool) -> None:
    """Evict all pods. Unless *is_urgent* is true, wait until they have terminated.

    Raise Later after *wait_seconds*, or at *not_before* (Unix seconds).
    """
    if not_before is not None:
        wait_seconds = min(wait_seconds, not_before - time.time())
    give_up_at = time.monotonic() + wait_seconds
    while True:
        left = None if not_before is None else not_before - time.time() - MARGIN_SECONDS
        pods = list(node.pods())
        staying, why = [], ""
        for pod in pods:
            if "deletionTimestamp" not in pod["metadata"]:
                refusal = node.evict(pod, left if left is not None and left > 0 else None)
                staying += [pod] if refusal else []
                why = refusal or why
        if not staying and (is_urgent or not pods):
            return
        if time.monotonic() + PAUSE_SECONDS > give_up_at:
            if staying:
                raise Later(f"{len(staying)} of {len(pods)} pods cannot be evicted yet: {names(staying)}: {why}")
            raise Later(f"{len(pods)} pods have not ended yet: {names(pods)}.")
        time.sleep(PAUSE_SECONDS)


def event_type_of(event: dict[str, str]) -> str:
    """Return the event type in a form that is valid in a taint and in an Event's reason."""
    return re.sub("[^A-Za-z0-9]", "", event["EVENT_TYPE"])[:VALUE_CHARACTERS] or "Unknown"


def kubernetes_event(node: str, event: dict[str, str]) -> Json:
    """Return the Kubernetes Event for the record, such as RebootScheduled.

    The `uid` of the involved object is the node's name, as in the kubelet's own Events. Otherwise, some versions of
    `kubectl describe node` would not show the Event.
    """
    now = f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}"
    has_ended = event["TRANSITION"] in ENDS  # the record then contains the last known NotBefore
    not_before = f", not before {event['NOT_BEFORE']}" if event["NOT_BEFORE"] and not has_ended else ""
    message = f"{event['EVENT_TYPE']} {event['TRANSITION']}{not_before}. {event['DESCRIPTION']}".strip()
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{node}.{event['ID']}", "namespace": EVENT_NAMESPACE},
        "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node},
        "type": "Warning" if event["TRANSITION"] in DRAINING else "Normal",
        "reason": event_type_of(event) + event["TRANSITION"].capitalize(),
        "message": f"Azure scheduled event {event['EVENT_ID']}: {message}"[:MESSAGE_CHARACTERS],
        "source": {"component": COMPONENT, "host": node},
        "reportingComponent": COMPONENT,
        "reportingInstance": node,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }


def is_still_affected(event_id: str, spared: frozenset[str]) -> bool:
    """Return whether another active event requires a drain of this VM.

    Raise Later if the events are unknown.
    """
    command = ["scheduled-events-bridge", "status", "--json"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=STATUS_SECONDS, check=True)  # noqa: S603
        report = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise Later(f"The agent did not report its events: {error}") from None
    if report["active_event_ids"] is None:
        raise Later("The list of active events is not complete yet.")
    return any(
        event["affects_this_vm"] is not False and event["event_type"] not in spared and event["event_id"] != event_id
        for event in report["events"]
    )


def read_options() -> argparse.Namespace:
    """Return the command-line options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--now", action="store_true", help="evict the pods, but do not wait until they end")
    parser.add_argument("--spare", default="Freeze", help="event types without a drain, separated by commas [Freeze]")
    parser.add_argument("--cordon-only", action="store_true", help="cordon the node, but evict no pods")
    parser.add_argument("--taint", action="store_true", help=f"also set the taint {TAINT}=EVENT_TYPE:NoSchedule")
    parser.add_argument("--event", action="store_true", help="also write a Kubernetes Event for each record")
    parser.add_argument("--force", action="store_true", help="also evict pods that have no controller")
    parser.add_argument("--wait-seconds", type=float, help="the time that one run waits for pods [60; with --now 15]")
    parser.add_argument("--node", default=os.environ.get("NODE_NAME", ""), help="the node [$NODE_NAME]")
    parser.add_argument(
        "--service-account",
        type=Path,
        default=Path("/var/run/secrets/kubernetes.io/serviceaccount"),
        metavar="DIRECTORY",
    )
    return parser.parse_args()


def not_before_of(text: str) -> float | None:
    """Return SCHEDULED_EVENT_NOT_BEFORE in Unix seconds, or None if the time is unknown."""
    try:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return moment.replace(tzinfo=moment.tzinfo or timezone.utc).timestamp()


def prepare(node: Node, event: dict[str, str], options: argparse.Namespace) -> None:
    """Cordon and drain the node, because *event* affects it."""
    if event["AFFECTS_THIS_VM"] != "true":
        raise Failed(f"It is unknown whether the event affects this node. If it does, drain {options.node} manually.")
    exists = node.cordon(event["EVENT_ID"], event_type_of(event) if options.taint else "")
    if options.event:
        node.write_event(event)
    if exists and not options.cordon_only:
        wait_seconds = URGENT_WAIT_SECONDS if options.now else WAIT_SECONDS
        if options.wait_seconds is not None:
            wait_seconds = options.wait_seconds
        empty(node, not_before_of(event["NOT_BEFORE"]), wait_seconds=wait_seconds, is_urgent=options.now)


def process(node: Node, event: dict[str, str], options: argparse.Namespace) -> None:
    """Prepare the node if *event* is announced or starts.

    Uncordon the node if its last event has ended.
    """
    transition, affects = event["TRANSITION"], event["AFFECTS_THIS_VM"]
    spared = ADVISORY | frozenset(filter(None, options.spare.split(",")))
    if transition in DRAINING and affects != "false" and event["EVENT_TYPE"] not in spared:
        prepare(node, event, options)
    elif options.event and affects == "true" and transition in DRAINING | ENDS:
        node.write_event(event)
    if transition in ENDS and not is_still_affected(event["EVENT_ID"], spared):
        node.uncordon()
    elif transition == "test":
        pods = 0 if options.cordon_only else len(list(node.pods()))
        sys.stderr.write(f"The program would evict {pods} pods. Nothing was changed.\n")


def node_of(options: argparse.Namespace) -> Node:
    """Return the node in *options*, in the cluster of this pod."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not options.node:
        raise Failed("$KUBERNETES_SERVICE_HOST or $NODE_NAME is not set. Run the program in a pod, as in the overlay.")
    api = Api(host, port, options.service_account, URGENT_REQUEST_SECONDS if options.now else REQUEST_SECONDS)
    return Node(api, options.node, with_bare_pods=options.force)


def main() -> int:
    """Process the transition in the environment, and return the exit code."""
    options = read_options()
    wanted = ("ID", "TRANSITION", "EVENT_ID", "EVENT_TYPE", "NOT_BEFORE", "DESCRIPTION", "AFFECTS_THIS_VM")
    event = {name: os.environ.get(f"SCHEDULED_EVENT_{name}", "") for name in wanted}
    try:
        process(node_of(options), event, options)
    except Later as reason:
        sys.stderr.write(f"{reason}\n")
        return AGAIN_LATER
    except Failed as reason:
        sys.stderr.write(f"{reason}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
