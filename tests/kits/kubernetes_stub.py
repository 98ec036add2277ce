"""A strict Kubernetes API server on loopback with the nodes, pods, and evictions that a drain uses.

The server responds with 401, 403, 404, 405, 409, 415, and 422 and with Status objects like the real one, and records
all changes. Rules: the API reference of Kubernetes 1.31 (Node v1, Pod v1, Eviction policy/v1, Event v1).
"""

from __future__ import annotations

import json
import re
import ssl
import threading
import uuid
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from private_ca import PrivateCa

Json = dict[str, Any]
#: The allowed resources and verbs: exactly those that a drain needs.
RIGHTS = frozenset(
    {("nodes", "get"), ("nodes", "patch"), ("pods", "list"), ("pods/eviction", "create"), ("events", "create")}
)
_MERGE_PATCH = "application/merge-patch+json"


class KubernetesStub:
    """The API of a cluster. `directory` is the mounted service account directory of a pod."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._authority = PrivateCa(directory)
        (directory / "ca.crt").write_bytes(self._authority.ca_file.read_bytes())
        self.nodes: dict[str, Json] = {}
        self.pods: dict[tuple[str, str], Json] = {}
        self.kept: set[str] = set()
        """Names of pods that a PodDisruptionBudget protects."""
        self.rights = RIGHTS
        self.used: set[tuple[str, str]] = set()
        self.changes: list[tuple[str, str, Json]] = []
        """Method, path, and body of every modifying request, including rejected ones."""
        self.evictions: dict[str, Json] = {}
        """The options of each accepted eviction, by pod name."""
        self.events: dict[str, Json] = {}
        """The Events of the namespace "default", by their names."""
        self.refused_tokens: list[str] = []
        self.broken: set[str] = set()
        """Verbs that return 500."""
        self.conflicts = 0
        """The number of patches that fail with a conflict, because another client has just changed the node."""
        self.lists_until_gone = 1
        """The number of lists that still contain an evicted pod."""
        self.page = 500
        self.set_token("token-1")
        self._server = _Server(self, self._authority.server_context())
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()

    @property
    def port(self) -> int:
        """The port on 127.0.0.1."""
        return int(self._server.server_address[1])

    def set_token(self, token: str, *, in_file: bool = True) -> None:
        """Make *token* the only valid token, and write it to the file of the pod."""
        self.token = token
        if in_file:
            (self.directory / "token").write_text(f"{token}\n")

    def add_node(self, name: str, **spec: object) -> Json:
        """Create and return a node."""
        self.nodes[name] = {"metadata": {"name": name, "resourceVersion": "1"}, "spec": spec}
        return self.nodes[name]

    def add_pod(self, name: str, node: str, owner: str | None = "ReplicaSet", **more: Any) -> Json:
        """Create a pod on *node* with a controller of the kind *owner*. *more* is annotations, phase, and grace."""
        metadata: Json = {"name": name, "namespace": more.get("namespace", "shop"), "uid": str(uuid.uuid4())}
        if owner:
            metadata["ownerReferences"] = [{"kind": owner, "name": "owner", "controller": True}]
        if "annotations" in more:
            metadata["annotations"] = more["annotations"]
        spec = {"nodeName": node, "terminationGracePeriodSeconds": more.get("grace", 30)}
        pod = {"metadata": metadata, "spec": spec, "status": {"phase": more.get("phase", "Running")}}
        self.pods[metadata["namespace"], name] = pod
        return pod

    # The API.

    def get_node(self, name: str) -> tuple[int, Json]:
        """Return the node."""
        return (200, self.nodes[name]) if name in self.nodes else _missing("nodes", name)

    def patch_node(self, name: str, body: Json) -> tuple[int, Json]:
        """Merge *body* into the node (RFC 7396) if it was read since its last change."""
        if name not in self.nodes:
            return _missing("nodes", name)
        node = self.nodes[name]
        if self.conflicts:
            self.conflicts -= 1
            _touch(node)
        version = body.get("metadata", {}).get("resourceVersion")
        if version is not None and version != node["metadata"]["resourceVersion"]:
            return _status(
                409, "Conflict", f'Operation cannot be fulfilled on nodes "{name}": the object has been modified'
            )
        if set(body) - {"metadata", "spec"} or set(body.get("spec", {})) - {"unschedulable", "taints"}:
            return _status(422, "Invalid", "unknown field")
        for taint in body["spec"].get("taints", []):
            if set(taint) != {"key", "value", "effect"} or not re.fullmatch("[A-Za-z0-9]{1,63}", taint["value"]):
                return _status(422, "Invalid", f"spec.taints: Invalid value: {taint}")
        merged = _merged(node, {**body, "metadata": {**body.get("metadata", {}), "resourceVersion": version}})
        _touch(merged)
        self.nodes[name] = merged
        return 200, merged

    def list_pods(self, query: dict[str, list[str]]) -> tuple[int, Json]:
        """Return a page of the pods of one node."""
        if set(query) - {"fieldSelector", "limit", "continue"}:
            return _status(400, "BadRequest", f"unknown parameter in {sorted(query)}")
        found = re.fullmatch(r"spec\.nodeName=([\w.-]+)", query.get("fieldSelector", [""])[0])
        if not found:
            return _status(400, "BadRequest", "unable to parse the field selector")
        pods = [pod for pod in self.pods.values() if pod["spec"]["nodeName"] == found[1]]
        start = int(query.get("continue", ["0"])[0])
        end = start + min(self.page, int(query.get("limit", ["500"])[0]))
        metadata = {"resourceVersion": "9", **({"continue": str(end)} if end < len(pods) else {})}
        page = json.loads(json.dumps({"kind": "PodList", "metadata": metadata, "items": pods[start:end]}))
        self._let_go(pods[start:end])
        return 200, page

    def _let_go(self, pods: Iterable[Json]) -> None:
        for pod in pods:
            if "deletionTimestamp" in pod["metadata"]:
                pod["listed"] = pod.get("listed", 0) + 1
                if pod["listed"] >= self.lists_until_gone:
                    del self.pods[pod["metadata"]["namespace"], pod["metadata"]["name"]]

    def evict(self, namespace: str, name: str, body: Json) -> tuple[int, Json]:
        """Evict the pod, unless a budget protects it."""
        wanted = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": namespace}}
        if {key: value for key, value in body.items() if key != "deleteOptions"} != wanted:
            return _status(400, "BadRequest", "no such Eviction is known, or its name is not that of the URL")
        options = body.get("deleteOptions", {})
        if set(options) - {"gracePeriodSeconds", "preconditions"} or options.get("gracePeriodSeconds", 1) < 0:
            return _status(422, "Invalid", "deleteOptions")
        pod = self.pods.get((namespace, name))
        if pod is None:
            return _missing("pods", name)
        if options.get("preconditions", {}).get("uid", pod["metadata"]["uid"]) != pod["metadata"]["uid"]:
            return _status(409, "Conflict", "the UID in the precondition does not match the UID in record")
        if name in self.kept:
            message = "Cannot evict pod as it would violate the pod's disruption budget."
            return _status(429, "TooManyRequests", message)
        pod["metadata"]["deletionTimestamp"] = "2026-11-20T11:00:00Z"
        self.evictions[name] = options
        return 201, {"kind": "Status", "apiVersion": "v1", "status": "Success", "code": 201}

    def add_event(self, namespace: str, body: Json) -> tuple[int, Json]:
        """Store an Event about a node, unless an Event with this name exists."""
        metadata, node = body["metadata"], body["involvedObject"]
        if namespace != "default" or metadata["namespace"] != namespace:
            return _status(422, "Invalid", "involvedObject.namespace: Invalid value: does not match event.namespace")
        if node != {"apiVersion": "v1", "kind": "Node", "name": node["name"], "uid": node["name"]}:
            return _status(422, "Invalid", "involvedObject")
        if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", metadata["name"]):
            return _status(422, "Invalid", "metadata.name: a lowercase RFC 1123 subdomain is required")
        if body["type"] not in {"Normal", "Warning"} or not re.fullmatch("[A-Za-z0-9]+", body["reason"]):
            return _status(422, "Invalid", "type or reason")
        if metadata["name"] in self.events:
            return _status(409, "AlreadyExists", f'events "{metadata["name"]}" already exists')
        self.events[metadata["name"]] = body
        return 201, body


def _touch(item: Json) -> None:
    item["metadata"]["resourceVersion"] = str(int(item["metadata"]["resourceVersion"] or 0) + 1)


def _merged(item: Json, patch: Json) -> Json:
    result = dict(item)
    for key, value in patch.items():
        if value is None and key != "resourceVersion":
            result.pop(key, None)
        elif isinstance(value, dict):
            result[key] = _merged(result.get(key) or {}, value)
        elif value is not None:
            result[key] = value
    return result


def _status(code: int, reason: str, message: str) -> tuple[int, Json]:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }
    return code, body


def _missing(resource: str, name: str) -> tuple[int, Json]:
    return _status(404, "NotFound", f'{resource} "{name}" not found')


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, cluster: KubernetesStub, context: ssl.SSLContext) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.cluster = cluster
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def handle_error(self, *_: object) -> None:
        """Log nothing about clients that disconnect or trust another CA."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        self._answer(*self._dispatch())

    def do_PATCH(self) -> None:
        self._answer(*self._dispatch())

    def do_POST(self) -> None:
        self._answer(*self._dispatch())

    def _dispatch(self) -> tuple[int, Json]:
        cluster, path = self.server.cluster, urlsplit(self.path).path
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        given = self.headers.get("Authorization", "")
        if given != f"Bearer {cluster.token}":
            cluster.refused_tokens.append(given)
            return _status(401, "Unauthorized", "Unauthorized")
        found = self._route(path)
        if found is None:
            return _status(404, "NotFound", "the server could not find the requested resource")
        cluster.used.add(found[:2])
        if found[:2] not in cluster.rights:
            who = "system:serviceaccount:scheduled-events-bridge:scheduled-events-bridge"
            message = f'{found[0]} is forbidden: User "{who}" cannot {found[1]} resource "{found[0]}"'
            return _status(403, "Forbidden", message)
        return self._allowed(path, *found, body)

    def _allowed(self, path: str, resource: str, verb: str, names: tuple[str, ...], body: bytes) -> tuple[int, Json]:
        cluster = self.server.cluster
        if verb in cluster.broken:
            return _status(500, "InternalError", "etcdserver: request timed out")
        if verb == "get":
            return cluster.get_node(*names)
        if verb == "list":
            return cluster.list_pods(parse_qs(urlsplit(self.path).query))
        wanted = _MERGE_PATCH if resource == "nodes" else "application/json"
        if self.headers.get("Content-Type") != wanted:
            return _status(415, "UnsupportedMediaType", f"the body of the request was not {wanted}")
        parsed = json.loads(body)
        cluster.changes.append((self.command, path, parsed))
        if verb == "patch":
            return cluster.patch_node(names[0], parsed)
        is_event = resource == "events"
        return cluster.add_event(names[0], parsed) if is_event else cluster.evict(names[0], names[1], parsed)

    def _route(self, path: str) -> tuple[str, str, tuple[str, ...]] | None:
        """Return the resource, the verb and the names of a request, or None."""
        routes = (
            ("GET", r"/api/v1/nodes/([^/]+)", "nodes", "get"),
            ("PATCH", r"/api/v1/nodes/([^/]+)", "nodes", "patch"),
            ("GET", r"/api/v1/pods()", "pods", "list"),
            ("POST", r"/api/v1/namespaces/([^/]+)/pods/([^/]+)/eviction", "pods/eviction", "create"),
            ("POST", r"/api/v1/namespaces/([^/]+)/events", "events", "create"),
        )
        for method, pattern, resource, verb in routes:
            found = re.fullmatch(pattern, path)
            if found and method == self.command:
                return resource, verb, found.groups()
        return None

    def _answer(self, status: int, body: Json) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        if status == 429:
            self.send_header("Retry-After", "10")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Log nothing."""
