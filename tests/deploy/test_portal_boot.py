"""Follows the installation page of the portal on a booted systemd (systemd/boot.sh).

Every block of the page runs unchanged. The installation uses wheels that were downloaded before.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import doc_pages
import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
PAGE = doc_pages.page("docs/operate/portal.md")
NAME = "scheduled-events-portal"
BLOCKS = [each.mark.partition(": ")[2] for each in doc_pages.blocks(PAGE) if each.mark.startswith("portal service: ")]
BOOT_SECONDS = 1300  # on a busy machine; an idle machine needs a tenth


@pytest.fixture(scope="module")
def wheels(deploy, package_source, clean_environment, service_python, tmp_path_factory):
    """Return a directory with the wheel of the portal, and the locked libraries in a subdirectory."""
    directory = tmp_path_factory.mktemp("wheels")
    pip = [service_python, "-m", "pip"]
    fetched = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    fetched += ["--dest", directory / "libraries", "--requirement", deploy / "portal/requirements.txt"]
    subprocess.run([*pip, *fetched], env=clean_environment, timeout=300, check=True)
    if package_source.suffix == ".whl":
        shutil.copy(package_source, directory)
    else:
        built = ["wheel", "--quiet", "--no-deps", "--wheel-dir", directory, package_source]
        subprocess.run([*pip, *built], env=clean_environment, timeout=300, check=True)
    return directory


@pytest.fixture(scope="module")
def goods(deploy, wheels, service_python, tool, tmp_path_factory):
    """Return a directory with the files for the machine: a checkout with its wheel, libraries, and the blocks."""
    for name in ("unshare", "ip", "runuser", "curl", "openssl"):
        tool(name)
    goods = tmp_path_factory.mktemp("boot") / "goods"
    (goods / "blocks").mkdir(parents=True)
    shutil.copy(HERE / "portal/drive.sh", goods)
    shutil.copytree(deploy / "portal", goods / "checkout/deploy/portal")
    shutil.copytree(wheels / "libraries", goods / "wheels")
    for wheel in wheels.glob("*.whl"):
        shutil.copy(wheel, goods / "checkout")
    for name in BLOCKS:
        text = doc_pages.marked(PAGE, f"portal service: {name}")
        text = text.replace("python3 -m venv", f"{service_python} -m venv")
        (goods / "blocks" / name.replace(" ", "-")).write_text(text)
    return goods


@pytest.fixture(scope="module")
def facts(goods, unable):
    directory = goods.parent
    with (directory / "console").open("wb") as console:
        done = subprocess.run(
            ["bash", HERE / "systemd/boot.sh", "none", directory], env={**os.environ},
            stdout=console, stderr=console, timeout=BOOT_SECONDS, check=False,
        )  # fmt: skip
    found = directory / "results/facts"
    if not found.exists():
        unable("no systemd of its own starts here", f"{done.returncode}: {(directory / 'console').read_text()}")
    for path in sorted((directory / "results").iterdir()):  # shown when a test fails
        sys.stdout.write(f"---- {path.name}\n{path.read_text()}\n")
    return dict(line.split("=", 1) for line in found.read_text().splitlines())


def test_every_command_block_of_the_page_succeeds(facts):
    assert {name: facts.get(name.replace(" ", "_")) for name in BLOCKS} == dict.fromkeys(BLOCKS, "0")
    assert facts["ready_again"] == "yes"
    assert facts["door"] == "200"


def test_portal_runs_in_the_sandbox(facts):
    assert facts["active"] == "active"
    assert facts["status"] == "Serving http://127.0.0.1:8443"
    assert facts["user"] == NAME
    assert int(facts["capabilities"], 16) == 0
    assert facts["seccomp"] == "2"
    resource = pytest.importorskip("resource", reason="no Linux")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert int(facts["descriptors"]) == min(65_536, most)
    assert facts["database"] == f"{NAME} 600"


def test_invalid_configuration_fails_the_start_until_it_is_fixed(facts):
    assert facts["restart_with_a_wrong_file"] != "0"
    assert int(facts["mistake_in_the_journal"]) >= 1
    assert facts["exit_status"] == "78"
    assert facts["ready_once_it_is_mended"] == "yes"


def test_portal_stops_within_the_grace_period(facts):
    assert int(facts["stop_seconds"]) <= 5
    assert facts["stopped_with"] == "0"
