"""Creates the OpenTelemetry resource and timestamps for logs, metrics, and traces."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from bridge.clock import parse_time
from bridge.events.event import VmIdentity

OTEL_PREFIX = "azure.scheduled_event."
"""The prefix of attributes that are not in the semantic conventions."""
SERVICE_NAME = "scheduled-events-bridge"
#: A label with one of these names from the semantic conventions (1.44, "Resource") becomes the attribute of that name.
CONVENTIONAL_LABELS = frozenset(
    {
        "deployment.environment.name",
        "host.image.id",
        "host.type",
        "k8s.cluster.name",
        "k8s.cluster.uid",
        "k8s.namespace.name",
        "k8s.node.name",
        "k8s.node.uid",
        "k8s.pod.name",
        "k8s.pod.uid",
        "os.name",
        "os.type",
        "os.version",
        "service.criticality",
        "service.name",
        "service.namespace",
    }
)


def unix_nanoseconds(moment: str) -> int:
    """Return *moment*, a time in a record, in Unix nanoseconds."""
    # The protobuf field is unsigned, but a clock that was never set can show a time before 1970.
    return max(0, round(parse_time(moment).timestamp() * 1000)) * 1_000_000


@cache
def own_version() -> str:
    """Return the agent's version."""
    try:
        return version(SERVICE_NAME)
    except PackageNotFoundError:
        return "unknown"


def resource_attributes(vm: VmIdentity, labels: Mapping[str, str], *, instance_id: str) -> dict[str, str]:
    """Return the attributes of the VM and the agent, which labels never replace.

    *instance_id* is the stream ID, which is new at each start. Labels whose names are not in `CONVENTIONAL_LABELS`
    become attributes with the prefix ``azure.scheduled_event.labels.``.
    """
    service = {"service.name": SERVICE_NAME, "service.version": own_version(), "service.instance.id": instance_id}
    known = {
        "cloud.provider": "azure",
        "cloud.platform": "azure.vm",
        "cloud.region": vm.location,
        "cloud.availability_zone": vm.zone,
        "cloud.account.id": vm.subscription_id,
        "cloud.resource_id": vm.resource_id,
        "host.id": vm.vm_id,
        "host.name": vm.name,
        "host.type": vm.size,
        "azure.resource_group.name": vm.resource_group,
        f"{OTEL_PREFIX}vm.scale_set": vm.scale_set,
        f"{OTEL_PREFIX}vm.placement_group_id": vm.placement_group_id,
        f"{OTEL_PREFIX}vm.fault_domain": vm.fault_domain,
        f"{OTEL_PREFIX}vm.update_domain": vm.update_domain,
        **{f"{OTEL_PREFIX}vm.tags.{name}": value for name, value in vm.tags.items()},
    }
    named = {
        name if name in CONVENTIONAL_LABELS else f"{OTEL_PREFIX}labels.{name}": value for name, value in labels.items()
    }
    found = {**service, **named, **{name: text for name, text in known.items() if text}}
    return {name: text for name, text in found.items() if text}
