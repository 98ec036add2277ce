"""Defines the simulated VMs, their instance documents, and their identity tokens.

The properties of a VM depend only on its name, so that the vmId stays the same when the simulator restarts. A VM whose
name has the form ``<scale set>_<decimal>`` is an instance of a uniform scale set. The tokens are JWTs with an invalid
signature. The formats are from Microsoft's pages "Azure Instance Metadata Service" and "How to use managed identities
... to acquire an access token".
"""

from __future__ import annotations

import base64
import json
import re
import uuid
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

_NAMESPACE = uuid.UUID("3b0d1d0e-9d8b-5f4e-8a57-7f0a6f1c2e11")
_SCALE_SET_NAME = re.compile(r"(?P<scale_set>.+)_(?P<number>\d+)")
_TOKEN_SECONDS = 86_400
_TENANT = str(uuid.uuid5(_NAMESPACE, "tenant"))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One simulated virtual machine."""

    name: str
    subscription_id: str = str(uuid.uuid5(_NAMESPACE, "subscription"))
    resource_group: str = "simulated"
    location: str = "westeurope"
    zone: str = "1"
    tags: dict[str, str] = field(default_factory=lambda: {"simulated": "true"})

    @property
    def vm_id(self) -> str:
        """Return the vmId, which is derived from the name."""
        return str(uuid.uuid5(_NAMESPACE, "vm:" + self.name))

    @property
    def scale_set(self) -> str:
        """Return the name of the scale set, or "" for a single VM."""
        found = _SCALE_SET_NAME.fullmatch(self.name)
        return found["scale_set"] if found else ""

    @property
    def resource_id(self) -> str:
        """Return the ARM resource ID."""
        group = f"/subscriptions/{self.subscription_id}/resourceGroups/{self.resource_group}"
        compute = f"{group}/providers/Microsoft.Compute"
        if not self.scale_set:
            return f"{compute}/virtualMachines/{self.name}"
        number = self.name.rpartition("_")[2]
        return f"{compute}/virtualMachineScaleSets/{self.scale_set}/virtualMachines/{number}"

    def compute(self) -> dict[str, Any]:
        """Return the compute section of the instance document."""
        scale_set_id = self.resource_id.rpartition("/virtualMachines/")[0] if self.scale_set else ""
        return {
            "azEnvironment": "AzurePublicCloud",
            "location": self.location,
            "name": self.name,
            "offer": "debian-12",
            "osType": "Linux",
            "placementGroupId": str(uuid.uuid5(_NAMESPACE, "group:" + self.scale_set)) if self.scale_set else "",
            "platformFaultDomain": "0",
            "platformUpdateDomain": "0",
            "provider": "Microsoft.Compute",
            "publisher": "Debian",
            "resourceGroupName": self.resource_group,
            "resourceId": self.resource_id,
            "sku": "12-gen2",
            "subscriptionId": self.subscription_id,
            "tags": ";".join(f"{name}:{value}" for name, value in self.tags.items()),
            "tagsList": [{"name": name, "value": value} for name, value in self.tags.items()],
            "version": "latest",
            "virtualMachineScaleSet": {"id": scale_set_id},
            "vmId": self.vm_id,
            "vmScaleSetName": self.scale_set,
            "vmSize": "Standard_D2s_v5",
            "zone": self.zone,
        }

    def instance(self) -> dict[str, Any]:
        """Return the whole instance document."""
        address = {"privateIpAddress": "10.0.0.4", "publicIpAddress": ""}
        ipv4 = {"ipAddress": [address], "subnet": [{"address": "10.0.0.0", "prefix": "24"}]}
        interface = {"ipv4": ipv4, "ipv6": {"ipAddress": []}, "macAddress": "000D3A000004"}
        return {"compute": self.compute(), "network": {"interface": [interface]}}

    def token(self, resource: str, *, client_id: str, now: datetime) -> dict[str, str]:
        """Return the token response of the managed identity for *resource*."""
        issued = int(now.timestamp())
        expires = issued + _TOKEN_SECONDS
        identity = client_id or str(uuid.uuid5(_NAMESPACE, "client:" + self.name))
        claims = {
            "aud": resource,
            "iss": f"https://sts.windows.net/{_TENANT}/",
            "iat": issued,
            "nbf": issued,
            "exp": expires,
            "appid": identity,
            "oid": str(uuid.uuid5(_NAMESPACE, "object:" + identity)),
            "tid": _TENANT,
            "xms_mirid": self.resource_id,
        }
        return {
            "access_token": _unsigned_jwt(claims),
            "client_id": identity,
            "expires_in": str(_TOKEN_SECONDS),
            "expires_on": str(expires),
            "ext_expires_in": str(_TOKEN_SECONDS),
            "not_before": str(issued),
            "resource": resource,
            "token_type": "Bearer",
        }


def _unsigned_jwt(claims: dict[str, Any]) -> str:
    header = {"typ": "JWT", "alg": "RS256", "kid": "simulated"}
    parts = [json.dumps(part, separators=(",", ":")).encode() for part in (header, claims)]
    parts.append(b"simulated, not signed")
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)
