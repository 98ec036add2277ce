"""Each file under deploy/ is judged by a test: whoever adds one says here by which."""

import subprocess
from pathlib import Path, PurePosixPath

import pytest

pytestmark = pytest.mark.deploy

HERE = Path(__file__).parent
#: Pattern of a path below deploy/ (no pattern crosses a slash), and the module that judges the files of it.
JUDGES = {
    "README.md": "../docs/test_operators.py",
    "*/README.md": "../docs/test_readme.py",
    "azure/kql/README.md": "../docs/test_operators.py",
    "systemd/*": "test_systemd.py",
    "artifact/*": "test_artifact.py",
    "artifact/package/*": "test_packages.py",
    "ansible/*.yml": "test_ansible.py",
    "ansible/roles/*/*/*.yml": "test_ansible.py",
    "docker/Dockerfile": "test_docker.py",
    "docker/Dockerfile.dockerignore": "test_docker.py",
    "docker/healthcheck.py": "test_docker.py",
    "kubernetes/base/*": "test_kubernetes.py",
    "kubernetes/prometheus.yml": "test_kubernetes.py",
    "kubernetes/drain.py": "../e2e/test_kubernetes_drain.py",
    "kubernetes/overlays/*/*": "test_kubernetes.py",
    "helm/*/*": "test_helm.py",
    "helm/*/templates/*": "test_helm.py",
    "portal/Dockerfile": "test_portal_docker.py",
    "portal/Dockerfile.dockerignore": "test_portal_container.py",
    "portal/healthcheck.py": "test_portal_container.py",
    "portal/requirements.txt": "test_portal_docker.py",
    "portal/nginx.conf": "test_portal_proxy.py",
    "portal/systemd/*": "test_portal_systemd.py",
    "portal/kubernetes/base/*": "test_portal_kubernetes.py",
    "portal/kubernetes/overlays/*/*": "test_portal_kubernetes.py",
    "portal/prometheus/*.yml": "test_portal_prometheus.py",
    "portal/prometheus/tests/*.yml": "test_portal_prometheus.py",
    "windows/install.ps1": "test_windows.py",
    "windows/*.py": "test_windows.py",
    "windows/config.toml": "test_windows.py",
    "windows/requirements.in": "test_windows.py",
    "azure/*.bicep": "test_azure.py",
    "azure/fleet/*.bicep": "test_azure.py",
    "azure/fleet/*.json": "test_fleet.py",
    "azure/setup.sh": "test_azure.py",
    "azure/config.toml": "test_azure.py",
    "azure/cloud-init.yaml": "test_azure.py",
    "azure/kql/queries/*.kql": "test_kql.py",
    "azure/kql/*/*.kql": "test_kql.py",
    "azure/kql/*/table.json": "test_kql.py",
    "terraform/fleet/*.tf": "test_terraform.py",
    "grafana/*.json": "test_grafana.py",
    "grafana/.lint": "test_grafana.py",
    "prometheus/rules.yml": "test_prometheus.py",
    "prometheus/prometheus*.yml": "test_prometheus.py",
    "prometheus/targets/*.yml": "test_prometheus.py",
    "prometheus/tests/*.yml": "test_prometheus.py",
    "otel-collector/config.yaml": "test_otelcol.py",
}


def fits(path, pattern):
    return len(path.parts) == len(PurePosixPath(pattern).parts) and path.match(pattern)


@pytest.fixture(scope="module")
def files(checkout):
    """Return the paths below deploy/ that git knows, or would if they were added."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "deploy"],
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout.split("\0")
    known = [name for name in listed if name and (checkout / name).is_file()]
    return [PurePosixPath(name).relative_to("deploy") for name in known]


def test_every_file_is_judged_by_a_test(files):
    assert files
    strays = [str(path) for path in files if not any(fits(path, pattern) for pattern in JUDGES)]
    assert strays == [], "write a test that judges it, and name it in JUDGES"


def test_every_pattern_means_a_file(files):
    assert [pattern for pattern in JUDGES if not any(fits(path, pattern) for path in files)] == []


@pytest.mark.parametrize("module", sorted(set(JUDGES.values())))
def test_every_judge_is_there(module):
    assert (HERE / module).is_file()
