"""Manifests of Kubernetes: as kustomize builds them, and what is looked up in them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Manifest = Mapping[str, Any]


def built(directory: Path, *, kustomize: str, yaml: Any) -> list[Manifest]:
    """Return what the kustomization in *directory* builds, without a warning."""
    command = [kustomize, "build", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return list(yaml.safe_load_all(done.stdout))


def only(manifests: Iterable[Manifest], kind: str) -> Manifest:
    """Return the one manifest of *kind*."""
    found = [manifest for manifest in manifests if manifest["kind"] == kind]
    assert len(found) == 1, kind
    return found[0]


def mount(container: Manifest, path: str) -> Manifest:
    """Return the mount that holds *path*."""
    inside = [found for found in container["volumeMounts"] if f"{path}/".startswith(f"{found['mountPath']}/")]
    assert inside, f"nothing is mounted at {path}"
    return max(inside, key=lambda found: len(found["mountPath"]))


def volume_of(pod: Manifest, found: Manifest) -> Manifest:
    """Return the volume behind the mount that was *found*."""
    volumes: list[Manifest] = [volume for volume in pod["volumes"] if volume["name"] == found["name"]]
    assert len(volumes) == 1, found["name"]
    return volumes[0]
