#!/usr/bin/env python3
# ruff: noqa: S603
"""Checks, builds, and tests a release.

These are all steps of release.yml that need no credentials.

- `check --tag v1.2.3` checks that all files contain the version of the tag.
- `build --out dist` builds the packages, archives, chart, SBOM, release notes, and SHA256SUMS.
- `verify --out dist` checks that the release is complete, and that it can be installed and run.
- `publish --out dist --tag v1.2.3` creates the GitHub release with `gh`, which needs GH_TOKEN.

`build` needs the tools in .ci/release-tools.txt. Without --tag, `check` is a rehearsal, and accepts an "Unreleased"
section in CHANGELOG.md and uncommitted changes in the tree. The program validates a tag before any other use, and never
passes it to a shell.
"""

from __future__ import annotations

import argparse
import email
import gzip
import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import uuid
import venv
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "deploy/artifact/requirements.txt"
NAME = "scheduled-events-bridge"
#: The architecture in the name of an archive, and the output of `uname -m`, which RPM also uses.
MACHINES = {"x86_64": "x86_64", "arm64": "aarch64"}
#: The program that builds each kind of package.
PACKAGERS = {"deb": "dpkg-deb", "rpm": "rpmbuild"}
SUMS = "SHA256SUMS"
#: The text of the release page. This file is not part of the release.
NOTES = "NOTES.md"
CHARTS = (NAME, "scheduled-events-portal")
#: The other files that contain the version, and the text before the version in each file.
PLACES = (
    ("deploy/docker/Dockerfile", r"^ARG VERSION="),
    ("deploy/kubernetes/base/kustomization.yaml", r"^ *newTag: "),
    ("deploy/**/Chart.yaml", r"^version: "),
    ("deploy/**/Chart.yaml", r"^appVersion: "),
)
#: The sandbox of the service hides these directories, so install.sh refuses a Python interpreter in them.
HIDDEN = ("/root/", "/home/", "/run/user/", "/tmp/", "/var/tmp/")  # noqa: S108


class Refused(Exception):
    """A release is not possible. The message has one sentence for each reason."""

    def __init__(self, *faults: str) -> None:
        super().__init__("\n".join(faults))


def run(*command: str | Path, **environment: str) -> str:
    """Run *command*, and return its standard output."""
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise Refused(f"{' '.join(map(str, command))} failed with {done.returncode}.\n{done.stdout}".strip())
    return done.stdout.strip()


def git(*words: str) -> str | None:
    """Return the output of a git command, or None if the command fails."""
    done = subprocess.run(("git", "-C", ROOT, *words), capture_output=True, text=True, check=False)  # noqa: S607
    return None if done.returncode else done.stdout.rstrip()


def sha256(path: Path) -> str:
    """Return the digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def version_here() -> str:
    """Return the version that pyproject.toml declares."""
    version: str = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise Refused(f"The version {version} of pyproject.toml is not of the form 1.2.3.")
    return version


# ---- check ----------------------------------------------------------------------------------------------------------


def check(tag: str | None, on: str | None) -> None:
    """Check the release, and write its version and image name to the workflow's output."""
    version = version_here()
    faults = [*faults_of_changelog(version, tag), *faults_of_places(version)]
    if tag is not None:
        faults += faults_of_tag(version, tag) or [*faults_of_tree(tag, on)]
    if faults:
        raise Refused(*faults)
    if os.environ.get("GITHUB_OUTPUT"):
        image = f"ghcr.io/{os.environ['GITHUB_REPOSITORY'].lower()}"
        with Path(os.environ["GITHUB_OUTPUT"]).open("a", encoding="utf-8") as file:
            file.write(f"version={version}\nimage={image}\n")
    say(f"{tag or 'A rehearsal'}: all files contain the version {version}")


def faults_of_tag(version: str, tag: str) -> list[str]:
    """Return the errors in the name of the tag."""
    if tag == f"v{version}":
        return []
    return [f"The tag is {tag}, but pyproject.toml has {version}. Use the tag v{version}, or change the version."]


def sections() -> list[tuple[str, str]]:
    """Return the title and text of each section of CHANGELOG.md, newest first."""
    parts = re.split(r"(?m)^## ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))[1:]
    return [(title.strip(), text.strip()) for title, _, text in (part.partition("\n") for part in parts)]


def faults_of_changelog(version: str, tag: str | None) -> Iterator[str]:
    """Yield the errors in CHANGELOG.md."""
    released = re.compile(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)")
    draft = f"Unreleased: {version}"
    found = [(title, text) for title, text in sections() if title == draft or released.fullmatch(title)]
    if not found:
        yield f"CHANGELOG.md has no section for {version}. Add the heading ## {version} (YEAR-MONTH-DAY)."
        return
    title, text = found[0]
    if tag is not None and title == draft:
        yield f"CHANGELOG.md still contains ## {draft}. Change it to ## {version} (YEAR-MONTH-DAY)."
    if not text:
        yield f"The section ## {title} of CHANGELOG.md is empty."
    if sections()[0][0] != title:
        yield f"The first section of CHANGELOG.md is ## {sections()[0][0]}, but the version is {version}."


def faults_of_places(version: str) -> Iterator[str]:
    """Yield an error for each file that contains a different version."""
    for pattern, before in PLACES:
        for path in sorted(ROOT.glob(pattern)):
            said = re.findall(rf"(?m){before}[\"']?([^\"'\s]*)", path.read_text(encoding="utf-8"))
            if said != [version]:
                versions = " and ".join(said) or "no version"
                yield f"{path.relative_to(ROOT)} contains {versions}, but the version is {version}."


def faults_of_tree(tag: str, on: str | None) -> Iterator[str]:
    """Yield the reasons why this tree, on the branch *on*, cannot be released as *tag*."""
    changed = git("status", "--porcelain")
    if changed is None:
        yield f"{ROOT} is not a git checkout."
        return
    if changed:
        names = [line[3:] for line in changed.splitlines()]
        yield f"The tree has uncommitted changes: {', '.join(names[:5])}{' and more' if names[5:] else ''}."
    head, tagged = git("rev-parse", "HEAD"), git("rev-parse", "--verify", "--quiet", f"refs/tags/{tag}^{{commit}}")
    if tagged not in (None, head):
        yield f"{tag} is not the commit that is checked out."
    if on is not None and git("merge-base", "--is-ancestor", "HEAD", on) is None:
        yield f"The commit is not on {on}. Merge it first."


# ---- build ----------------------------------------------------------------------------------------------------------


def build(out: Path) -> None:
    """Build all files of the release in *out*."""
    version = version_here()
    if out.exists() and any(out.iterdir()):
        raise Refused(f"{out} is not empty. Name a new directory, so that no old file is published.")
    missing = [tool for tool in PACKAGERS.values() if shutil.which(tool) is None]
    if missing:
        raise Refused(f"To build packages, install {' and '.join(missing)}.")
    epoch = os.environ.get("SOURCE_DATE_EPOCH") or git("log", "-1", "--format=%ct")
    times = {"SOURCE_DATE_EPOCH": epoch} if epoch else {}
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, **times)
    (wheel,) = out.glob("*.whl")
    packages = [word for kind in PACKAGERS for word in ("--package", kind)]
    say(run(sys.executable, ROOT / "deploy/artifact/build.py", "--wheel", wheel, "--out", out, *packages, **times))
    run(
        sys.executable, "-m", "cyclonedx_py", "requirements", LOCK, "--pyproject", ROOT / "pyproject.toml",
        "--output-reproducible", "--output-format", "JSON", "--output-file", out / sbom_name(version),
    )  # fmt: skip
    number(out / sbom_name(version), version)
    for chart in CHARTS:
        pack_chart(chart, out / chart_name(chart, version), int(epoch or 0))
    (out / NOTES).write_text(notes(version), encoding="utf-8")
    (out / SUMS).write_text("".join(f"{sha256(path)}  {path.name}\n" for path in files(out)), encoding="utf-8")
    say((out / SUMS).read_text(encoding="utf-8"))


def pack_chart(chart: str, archive: Path, epoch: int) -> None:
    """Pack *chart* like `helm package`. The same files always produce the same bytes."""
    folder = ROOT / "deploy/helm" / chart
    with (
        archive.open("wb") as file,
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=epoch) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.GNU_FORMAT) as tar,
    ):
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            member = tarfile.TarInfo(f"{chart}/{path.relative_to(folder).as_posix()}")
            content = path.read_bytes()
            member.size, member.mtime, member.mode = len(content), epoch, 0o644
            tar.addfile(member, io.BytesIO(content))


def number(sbom: Path, version: str) -> None:
    """Set the serial number of the SBOM. It depends only on the version and the lock file."""
    document = json.loads(sbom.read_text(encoding="utf-8"))
    document["serialNumber"] = uuid.uuid5(uuid.NAMESPACE_URL, f"pkg:pypi/{NAME}@{version}#{sha256(LOCK)}").urn
    sbom.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def files(out: Path) -> list[Path]:
    """Return the files that SHA256SUMS lists."""
    return sorted(path for path in out.iterdir() if path.name not in (SUMS, NOTES))


def notes(version: str) -> str:
    """Return the section of CHANGELOG.md for GitHub, where each line break is visible."""
    text = next(text for title, text in sections() if version in title.split())
    server, repository = (os.environ.get(name) for name in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY"))
    if server and repository:  # relative links do not work on the page of a release
        text = re.sub(r"\]\((?![a-z]+:|#)", f"]({server}/{repository}/blob/v{version}/", text)
    return unwrapped(text) + "\n"


def unwrapped(text: str) -> str:
    """Join the lines of each Markdown paragraph and list item. Keep code blocks and tables."""
    lines: list[str] = []
    fenced = False
    for line in text.splitlines():
        begins = fenced or not line.strip() or re.match(r"\s*([-*+|>#]|\d+\.|```)", line) is not None
        if line.lstrip().startswith("```"):
            fenced = not fenced
        if begins or not lines or not lines[-1].strip() or lines[-1].lstrip().startswith(("#", "```", "|")):
            lines.append(line)
        else:
            lines[-1] += f" {line.strip()}"
    return "\n".join(lines)


# ---- verify ---------------------------------------------------------------------------------------------------------


def verify(out: Path, *, install: bool) -> None:
    """Check that the release is complete. If *install* is true, also install and run it."""
    version = version_here()
    faults = [*faults_of_files(out, version)] or [*faults_of_contents(out, version)]
    if faults:
        raise Refused(*faults)
    if install:
        with tempfile.TemporaryDirectory() as name:
            install_wheel(out, version, Path(name))
            install_archive(out, version, Path(name))
    say(f"{len(files(out))} files of version {version} are complete{' and can be installed' if install else ''}")


def wanted(version: str) -> set[str]:
    """Return the names of the files that a release must contain."""
    distribution = NAME.replace("-", "_")
    archives = {f"{NAME}{kind}-{version}-linux-{arch}.tar.gz" for kind in ("", "-extras") for arch in MACHINES}
    debs = {f"{NAME}_{version}_{arch}.deb" for arch in ("amd64", "arm64")}
    rpms = {f"{NAME}-{version}-1.{machine}.rpm" for machine in MACHINES.values()}
    windows = f"{NAME}-{version}-windows-x86_64.zip"
    charts = {chart_name(chart, version) for chart in CHARTS}
    rest = {f"{distribution}-{version}.tar.gz", wheel_name(version), sbom_name(version), windows}
    return archives | charts | debs | rpms | rest


def sbom_name(version: str) -> str:
    """Return the file name of the SBOM."""
    return f"{NAME}-{version}.cdx.json"


def chart_name(chart: str, version: str) -> str:
    """Return the file name of the packed *chart*, in Helm's format."""
    return f"{chart}-{version}.tgz"


def wheel_name(version: str) -> str:
    """Return the file name of the wheel."""
    return f"{NAME.replace('-', '_')}-{version}-py3-none-any.whl"


def faults_of_files(out: Path, version: str) -> Iterator[str]:
    """Yield an error for each file that is missing, has changed, or is not in SHA256SUMS."""
    missing = sorted(name for name in {*wanted(version), SUMS, NOTES} if not (out / name).is_file())
    if missing:
        yield from (f"{out} does not contain {name}." for name in missing)
        return
    lines = (out / SUMS).read_text(encoding="utf-8").splitlines()
    said = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    found = {path.name: sha256(path) for path in files(out)}
    yield from (f"{out} does not contain {name}, which {SUMS} lists." for name in sorted(set(said) - set(found)))
    yield from (f"{SUMS} does not list {name}." for name in sorted(set(found) - set(said)))
    both = sorted(set(said) & set(found))
    yield from (f"The digest of {name} differs from {SUMS}." for name in both if said[name] != found[name])
    yield from (
        f"The name {name} does not contain the version {version}." for name in sorted(found) if version not in name
    )


def faults_of_contents(out: Path, version: str) -> Iterator[str]:
    """Yield an error for each file of the release that has wrong contents or metadata."""
    wheel = out / wheel_name(version)
    with zipfile.ZipFile(wheel) as held:
        metadata = held.read(f"{NAME.replace('-', '_')}-{version}.dist-info/METADATA")
    if email.message_from_bytes(metadata)["Version"] != version:
        yield f"The metadata of {wheel.name} do not contain the version {version}."
    for archive in (*(f"linux-{arch}.tar.gz" for arch in MACHINES), "windows-x86_64.zip"):
        path = out / f"{NAME}-{version}-{archive}"
        if digest_inside(path, f"wheels/{wheel.name}") != sha256(wheel):
            yield f"{path.name} does not contain the wheel of this folder."
    for chart in CHARTS:
        if digest_inside(out / chart_name(chart, version), "Chart.yaml") != sha256(
            ROOT / "deploy/helm" / chart / "Chart.yaml"
        ):
            yield f"{chart_name(chart, version)} does not contain the chart of this tree."
    bom = json.loads((out / sbom_name(version)).read_text(encoding="utf-8"))
    listed = {f"{part['name']}=={part['version']}" for part in bom.get("components", ())}
    lacking = set(re.findall(r"(?m)^[a-z0-9.-]+==[^ \n]+", LOCK.read_text(encoding="utf-8"))) - listed
    own = bom.get("metadata", {}).get("component", {})
    if bom.get("bomFormat") != "CycloneDX" or "serialNumber" not in bom or own.get("version") != version:
        yield f"{sbom_name(version)} is not a CycloneDX document of {NAME} {version} with a serial number."
    yield from (f"{sbom_name(version)} does not contain {pin}." for pin in sorted(lacking))


def digest_inside(archive: Path, name: str) -> str | None:
    """Return the digest of the file *name* in *archive*, or None if it has no such file."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as packed:
            path = next((path for path in packed.namelist() if path.partition("/")[2] == name), None)
            return hashlib.sha256(packed.read(path)).hexdigest() if path else None
    with tarfile.open(archive) as tar:
        member = next((member for member in tar if member.name.partition("/")[2] == name), None)
        content = tar.extractfile(member) if member else None
        return hashlib.sha256(content.read()).hexdigest() if content else None


def install_wheel(out: Path, version: str, directory: Path) -> None:
    """Install the wheel with its locked dependencies, and run it."""
    wheel = out.resolve() / wheel_name(version)
    lines = directory / "requirements.txt"
    own = f"{NAME} @ {wheel.as_uri()} --hash=sha256:{sha256(wheel)}\n"
    lines.write_text(LOCK.read_text(encoding="utf-8") + own, encoding="utf-8")
    venv.create(directory / "venv", with_pip=True)
    python = directory / "venv/bin/python"
    pip = (python, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:")
    run(*pip, "--require-hashes", "--requirement", lines)
    tried(python, version)


def install_archive(out: Path, version: str, directory: Path) -> None:
    """Install the archive for this machine without a package index, and run it."""
    arch = next((arch for arch, machine in MACHINES.items() if machine == platform.machine()), None)
    if sys.platform != "linux" or arch is None:
        say(f"No archive supports {platform.system()} on {platform.machine()}, so none was installed")
        return
    stem = f"{NAME}-{version}-linux-{arch}"
    run("tar", "-C", directory, "-xzf", out.resolve() / f"{stem}.tar.gz")
    tree = directory / "tree"
    run(directory / stem / "install.sh", "--root", tree, "--python", service_python(), PIP_NO_INDEX="1")
    tried((tree / f"opt/{NAME}/venv").resolve() / "bin/python3", version)


def tried(python: Path, version: str) -> None:
    """Raise Refused unless the installed program prints *version*."""
    said = run(python, "-I", "-m", "bridge", "--version")
    if version not in said.split():
        raise Refused(f"The installed program reports the version '{said}', but the version is {version}.")


def service_python() -> Path:
    """Return a Python interpreter that install.sh accepts."""
    ours = Path(sys.base_prefix) / "bin/python3"
    for python in (ours, Path("/usr/bin/python3"), Path("/usr/local/bin/python3")):
        if python.exists() and not str(python.resolve()).startswith(HIDDEN):
            return python
    raise Refused("The service needs a Python interpreter outside of /root, /home, and /tmp.")


# ---- publish --------------------------------------------------------------------------------------------------------


def publish(tag: str, out: Path) -> None:
    """Create the GitHub release with all its files. The release must not exist yet."""
    version = version_here()
    faults = faults_of_tag(version, tag)
    if faults:
        raise Refused(*faults)
    verify(out, install=False)
    words = ("--verify-tag", "--title", f"Scheduled Events Bridge {version}", "--notes-file", out / NOTES)
    say(run("gh", "release", "create", tag, *words, *files(out), out / SUMS))


# ---- the command line -----------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Print *text*."""
    sys.stdout.write(f"{text.rstrip()}\n")
    sys.stdout.flush()


def main() -> int:
    """Run the requested command. Return 1 if a release is not possible."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    parts = {name: commands.add_parser(name) for name in ("check", "build", "verify", "publish")}
    parts["check"].add_argument("--on", metavar="BRANCH", help="a branch that must contain the commit")
    parts["verify"].add_argument("--no-install", action="store_true", help="check only the files")
    for name in ("check", "publish"):
        parts[name].add_argument("--tag", required=name == "publish", help="v and the version")
    for name in ("build", "verify", "publish"):
        parts[name].add_argument("--out", type=Path, default=ROOT / "dist", help="the directory of the files (dist)")
    asked = parser.parse_args()
    todo: dict[str, Callable[[], None]] = {
        "check": lambda: check(asked.tag, asked.on),
        "build": lambda: build(asked.out),
        "verify": lambda: verify(asked.out, install=not asked.no_install),
        "publish": lambda: publish(asked.tag, asked.out),
    }
    try:
        todo[asked.command]()
    except Refused as refused:
        sys.stderr.write("".join(f"release: {line}\n" for line in str(refused).splitlines()))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
