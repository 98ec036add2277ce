"""Builds Kubernetes manifests with kustomize, and finds parts of them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Manifest = Mapping[str, Any]
#: The versions of Kubernetes for `check_schema`.
VERSIONS = ("1.29", "1.31", "1.33", "1.35", "newest")


def built(directory: Path, *, kustomize: str, yaml: Any) -> list[Manifest]:
    """Build the kustomization in *directory*, and check that there are no warnings."""
    command = [kustomize, "build", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return list(yaml.safe_load_all(done.stdout))


def check_schema(manifest: Manifest, version: str, validate: Any) -> None:
    """Check *manifest* against the schema of *version* with the package kubernetes_validate."""
    wanted = ".".join(validate.latest_version().split(".")[:2]) if version == "newest" else version
    assert validate.validate(manifest, wanted, strict=True) == wanted


def only(manifests: Iterable[Manifest], kind: str) -> Manifest:
    """Return the one manifest of *kind*."""
    found = [manifest for manifest in manifests if manifest["kind"] == kind]
    assert len(found) == 1, kind
    return found[0]


def mount(container: Manifest, path: str) -> Manifest:
    """Return the mount that contains *path*."""
    inside = [found for found in container["volumeMounts"] if f"{path}/".startswith(f"{found['mountPath']}/")]
    assert inside, f"nothing is mounted at {path}"
    return max(inside, key=lambda found: len(found["mountPath"]))


def volume_of(pod: Manifest, found: Manifest) -> Manifest:
    """Return the volume of the mount *found*."""
    volumes: list[Manifest] = [volume for volume in pod["volumes"] if volume["name"] == found["name"]]
    assert len(volumes) == 1, found["name"]
    return volumes[0]
