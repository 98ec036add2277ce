"""The checks of .ci/release.py that prevent an incorrect release, with a small tree and small release files.

The step `release` of .ci/run builds and installs the real files.
"""

import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(120)]

NAME = "scheduled-events-bridge"
VERSION = "1.2.3"
TAG = f"v{VERSION}"
WHEEL = f"scheduled_events_bridge-{VERSION}-py3-none-any.whl"
SDIST = f"scheduled_events_bridge-{VERSION}.tar.gz"
SBOM = f"{NAME}-{VERSION}.cdx.json"
ARCHIVES = [f"{NAME}{kind}-{VERSION}-linux-{arch}.tar.gz" for arch in ("x86_64", "arm64") for kind in ("", "-extras")]
PACKAGES = [f"{NAME}_{VERSION}_{arch}.deb" for arch in ("amd64", "arm64")]
ON_WINDOWS = f"{NAME}-{VERSION}-windows-x86_64.zip"
PACKAGES += [f"{NAME}-{VERSION}-1.{machine}.rpm" for machine in ("x86_64", "aarch64")]
IN_CHART = f"deploy/helm/{NAME}/Chart.yaml"
CHART = f'name: {NAME}\nversion: {VERSION}\nappVersion: "{VERSION}"\n'
CHART_ARCHIVE = f"{NAME}-{VERSION}.tgz"
PORTAL_CHART_ARCHIVE = f"scheduled-events-portal-{VERSION}.tgz"
PINS = ["msgspec==0.22.0", "markdown==3.10"]
LOCK = "msgspec==0.22.0 \\\n    --hash=sha256:aa\nmarkdown==3.10 ; python_version < '3.11' \\\n    --hash=sha256:bb\n"
CHANGELOG = f"""# Changelog

## {VERSION} (2026-11-22)

What a user gets:

- A thing that needs
  two lines, and [a page](docs/README.md).

## 1.2.2 (2026-01-01)

- Older.
"""


class Tree:
    """A git checkout with the files that the release checks read."""

    def __init__(self, root, program):
        self.root = root
        self.write("pyproject.toml", f'[project]\nname = "{NAME}"\nversion = "{VERSION}"\n')
        self.write("CHANGELOG.md", CHANGELOG)
        self.write("deploy/docker/Dockerfile", f"FROM x\nARG VERSION={VERSION}\n")
        self.write("deploy/kubernetes/base/kustomization.yaml", f"images:\n  - name: a\n    newTag: {VERSION}\n")
        self.write(f"deploy/helm/{NAME}/Chart.yaml", CHART)
        self.write(f"deploy/helm/{NAME}/templates/a.yaml", "kind: A\n")
        self.write("deploy/helm/scheduled-events-portal/Chart.yaml", CHART)
        self.write("deploy/artifact/requirements.txt", LOCK)
        (root / ".ci").mkdir()
        shutil.copy(program, root / ".ci/release.py")
        self.git("init", "--quiet", "--initial-branch=main")
        self.commit()
        self.git("tag", TAG)

    def write(self, name, text):
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text)

    def replace(self, name, old, new):
        text = (self.root / name).read_text()
        assert old in text
        self.write(name, text.replace(old, new))

    def commit(self):
        self.git("add", "--all")
        self.git("-c", "user.name=a", "-c", "user.email=a@example.net", "commit", "--quiet", "--message", "a")

    def git(self, *words):
        subprocess.run(["git", *words], cwd=self.root, capture_output=True, timeout=60, check=True)

    def release(self, *words, **environment):
        hidden = ("GITHUB_", "GIT_")
        env = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
        return subprocess.run(
            [sys.executable, self.root / ".ci/release.py", *words], env=env | environment,
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip


@pytest.fixture(scope="module")
def program(checkout):
    return checkout / ".ci/release.py"


@pytest.fixture
def tree(program, tmp_path):
    return Tree(tmp_path / "tree", program)


def refused(done, sentence):
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_tag_that_matches_every_file_is_accepted(tree, tmp_path):
    outputs = tmp_path / "outputs"
    done = tree.release(
        "check", "--tag", TAG, "--on", "main", GITHUB_OUTPUT=str(outputs), GITHUB_REPOSITORY="Some-Body/Bridge"
    )
    assert done.returncode == 0, done.stderr
    assert outputs.read_text() == "version=1.2.3\nimage=ghcr.io/some-body/bridge\n"


@pytest.mark.parametrize("tag", ["v1.2.4", "1.2.3", "v1.2.3-rc1", "v1.2.3\nversion=9", "--on", "v1.2.3;touch made"])
def test_tag_of_another_version_is_rejected(tree, tag, tmp_path):
    outputs = tmp_path / "outputs"
    done = tree.release("check", f"--tag={tag}", GITHUB_OUTPUT=str(outputs), GITHUB_REPOSITORY="a/b")
    refused(done, "but pyproject.toml has 1.2.3. Use the tag v1.2.3, or change the version.")
    assert not outputs.exists()
    assert not list(tmp_path.rglob("made"))


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (f"## {VERSION} (2026-11-22)", "## Later", "CHANGELOG.md has no section for 1.2.3"),
        (f"## {VERSION} (2026-11-22)", f"## {VERSION}", "CHANGELOG.md has no section for 1.2.3"),
        (CHANGELOG, "# Changelog\n", "CHANGELOG.md has no section for 1.2.3"),
        (CHANGELOG, f"# Changelog\n\n## {VERSION} (2026-11-22)\n\n## 1.2.2\n\n- Older.\n", "of CHANGELOG.md is empty."),
        ("# Changelog\n", "# Changelog\n\n## Unreleased: 1.3.0\n\n- Newer.\n", "first section of CHANGELOG.md is"),
        (f"## {VERSION} (2026-11-22)", f"## Unreleased: {VERSION}", "still contains ## Unreleased: 1.2.3. Change"),
    ],
)
def test_changelog_without_the_version_is_rejected(tree, old, new, sentence):
    tree.replace("CHANGELOG.md", old, new)
    tree.commit()
    tree.git("tag", "--force", TAG)
    refused(tree.release("check", "--tag", TAG), sentence)


@pytest.mark.parametrize("name", ["deploy/docker/Dockerfile", "deploy/kubernetes/base/kustomization.yaml", IN_CHART])
def test_file_with_another_version_is_rejected(tree, name):
    tree.replace(name, VERSION, "1.2.2")
    refused(tree.release("check"), f"{name} contains 1.2.2, but the version is 1.2.3.")


@pytest.mark.parametrize("name", ["CHANGELOG.md", "left-over.txt"])
def test_uncommitted_changes_are_rejected(tree, name):
    with (tree.root / name).open("a") as file:
        file.write("\n")
    refused(tree.release("check", "--tag", TAG), f"The tree has uncommitted changes: {name}.")


def test_tag_on_another_commit_is_rejected(tree):
    tree.write("more", "")
    tree.commit()
    refused(tree.release("check", "--tag", TAG), f"{TAG} is not the commit that is checked out.")


def packed(**contents):
    """Return a .tar.gz of *contents*, each under a directory."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"top/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def zipped(**contents):
    """Return a .zip of *contents*, each under a directory."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in contents.items():
            archive.writestr(f"top/{name}", content)
    return buffer.getvalue()


def wheel_of(version):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(f"scheduled_events_bridge-{VERSION}.dist-info/METADATA", f"Name: {NAME}\nVersion: {version}\n")
    return buffer.getvalue()


def bom_of(version, *components):
    parts = [dict(zip(("name", "version"), each.split("=="), strict=True)) for each in components]
    document = {"bomFormat": "CycloneDX", "metadata": {"component": {"version": version}}, "components": parts}
    return json.dumps(document | {"serialNumber": "urn:uuid:1"}).encode()


class Files:
    """Small release files. `seal` writes the checksums of the existing files."""

    def __init__(self, directory):
        self.directory = directory
        directory.mkdir()
        wheel = wheel_of(VERSION)
        self.put(WHEEL, wheel)
        self.put(SDIST, packed(PKG=b"x"))
        self.put(SBOM, bom_of(VERSION, *PINS))
        self.put("NOTES.md", b"- New.\n")
        for name in ARCHIVES:
            self.put(name, packed(**{f"wheels/{WHEEL}": wheel}))
        self.put(ON_WINDOWS, zipped(**{f"wheels/{WHEEL}": wheel}))
        for name in (CHART_ARCHIVE, PORTAL_CHART_ARCHIVE):
            self.put(name, packed(**{"Chart.yaml": CHART.encode()}))
        for name in PACKAGES:
            self.put(name, b"a package")
        self.seal()

    def put(self, name, content):
        (self.directory / name).write_bytes(content)

    def seal(self):
        listed = sorted(path for path in self.directory.iterdir() if path.name not in ("SHA256SUMS", "NOTES.md"))
        sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in listed]
        self.put("SHA256SUMS", "".join(sums).encode())


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path / "dist")


def verify(tree, files):
    return tree.release("verify", "--no-install", "--out", files.directory)


def test_complete_release_is_accepted(tree, files):
    done = verify(tree, files)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "name",
    [
        WHEEL,
        SDIST,
        SBOM,
        "NOTES.md",
        "SHA256SUMS",
        ON_WINDOWS,
        CHART_ARCHIVE,
        PORTAL_CHART_ARCHIVE,
        *ARCHIVES,
        *PACKAGES,
    ],
)
def test_missing_file_is_rejected_even_if_no_digest_is_listed(tree, files, name):
    (files.directory / name).unlink()
    if name != "SHA256SUMS":
        files.seal()
    refused(verify(tree, files), f"does not contain {name}.")


def test_file_without_a_digest_is_rejected(tree, files):
    files.put(f"stray-{VERSION}", b"")
    refused(verify(tree, files), f"SHA256SUMS does not list stray-{VERSION}.")


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        (WHEEL, wheel_of("1.2.2"), f"The metadata of {WHEEL} do not contain the version 1.2.3."),
        (ARCHIVES[0], packed(**{f"wheels/{WHEEL}": b"another"}), f"{ARCHIVES[0]} does not contain the wheel of"),
        (ARCHIVES[2], packed(other=b""), f"{ARCHIVES[2]} does not contain the wheel of this folder."),
        (ON_WINDOWS, zipped(**{f"wheels/{WHEEL}": b"another"}), f"{ON_WINDOWS} does not contain the wheel of"),
        (ON_WINDOWS, zipped(other=b""), f"{ON_WINDOWS} does not contain the wheel of this folder."),
        (
            CHART_ARCHIVE,
            packed(**{"Chart.yaml": b"name: b"}),
            f"{CHART_ARCHIVE} does not contain the chart of this tree.",
        ),
        (SBOM, bom_of(VERSION, "msgspec==0.22.0"), f"{SBOM} does not contain markdown==3.10."),
        (SBOM, bom_of("1.2.2", *PINS), f"{SBOM} is not a CycloneDX document"),
        (SBOM, bom_of(VERSION, *PINS).replace(b"serialNumber", b"number"), f"{SBOM} is not a CycloneDX document"),
    ],
    # The names of the cases cannot contain the packed bytes, which include the time and differ in each worker.
    ids=[
        "version",
        "archive's wheel",
        "no wheel",
        "zip's wheel",
        "zip without",
        "chart",
        "pin",
        "bom's version",
        "bom's kind",
    ],
)
def test_file_with_wrong_content_is_rejected(tree, files, name, content, sentence):
    files.put(name, content)
    files.seal()
    refused(verify(tree, files), sentence)


@pytest.fixture
def module(tree):
    spec = importlib.util.spec_from_file_location("release_of_tree", tree.root / ".ci/release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_packed_chart_is_complete_and_reproducible(module, tmp_path):
    first, second = tmp_path / "first.tgz", tmp_path / "second.tgz"
    for path in (first, second):
        module.pack_chart(NAME, path, 1_700_000_000)
    assert first.read_bytes() == second.read_bytes()
    with tarfile.open(first) as tar:
        packed_files = {member.name: tar.extractfile(member).read() for member in tar}
    assert packed_files == {f"{NAME}/Chart.yaml": CHART.encode(), f"{NAME}/templates/a.yaml": b"kind: A\n"}


def test_release_notes_are_the_changelog_section_with_one_line_per_item(module, monkeypatch):
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://example.net")
    monkeypatch.setenv("GITHUB_REPOSITORY", "a/b")
    page = "https://example.net/a/b/blob/v1.2.3/docs/README.md"
    assert module.notes(VERSION) == f"What a user gets:\n\n- A thing that needs two lines, and [a page]({page}).\n"


@pytest.fixture
def gh(tmp_path):
    """Return an environment with a gh that records its arguments, and the file with the arguments."""
    said = tmp_path / "said"
    program = tmp_path / "bin/gh"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{said}\n')
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:{os.environ['PATH']}"}, said


def test_release_page_contains_the_notes_and_every_file(tree, files, gh):
    environment, said = gh
    done = tree.release("publish", "--tag", TAG, "--out", files.directory, **environment)
    assert done.returncode == 0, done.stderr
    words = said.read_text().splitlines()
    assert words[:4] == ["release", "create", TAG, "--verify-tag"]
    assert words[words.index("--notes-file") + 1] == str(files.directory / "NOTES.md")
    assets = {Path(word).name for word in words[words.index("--notes-file") + 2 :]}
    assert assets == {path.name for path in files.directory.iterdir()} - {"NOTES.md"}


@pytest.mark.parametrize("fault", ["a missing file", "another tag"])
def test_incomplete_release_is_not_published(tree, files, gh, fault):
    environment, said = gh
    if fault == "a missing file":
        (files.directory / SDIST).unlink()
    tag = TAG if fault == "a missing file" else "v1.2.4"
    done = tree.release("publish", "--tag", tag, "--out", files.directory, **environment)
    assert done.returncode == 1
    assert not said.exists()
