"""Executes a Dockerfile without a container engine, instruction by instruction, with tests/deploy/docker/engine.sh.

Each RUN line runs unchanged as root on an overlay of this machine's files. The Python of the tests is at /usr/local, as
in the base image. The container runs with a read-only root, as the user of the image, and without capabilities.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ENGINE = Path(__file__).parents[1] / "deploy/docker/engine.sh"
#: The variables of the base image, and its linker configuration.
STAND_IN = "export PATH=/usr/local/bin:/usr/bin:/bin LD_LIBRARY_PATH=/usr/local/lib"

Stage = list[tuple[str, str]]


def read_stages(text: str) -> list[Stage]:
    """Return the instructions of each stage as (name, text), with continued lines joined."""
    lines = re.sub(r"(?m)^\s*#.*\n", "", text).replace("\\\n", " ")
    stages: list[Stage] = [[]]
    for line in filter(str.strip, lines.splitlines()):
        name, _, rest = line.partition(" ")
        if name == "FROM":
            stages.append([])
        stages[-1].append((name, rest.strip()))
    return stages[1:]


class Image:
    """The instructions of the final stage by name, each with a list of texts."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = stages
        self.words: dict[str, list[str]] = {}
        for name, text in stages[-1]:
            self.words.setdefault(name, []).append(text)

    @property
    def command(self) -> list[str]:
        """Return the command of a container."""
        return [*json.loads(self.words["ENTRYPOINT"][0]), *json.loads(self.words["CMD"][0])]

    @property
    def health_command(self) -> list[str]:
        """Return the command of the health check."""
        found: list[str] = json.loads(self.words["HEALTHCHECK"][0].partition("CMD ")[2])
        return found


def engine(
    what: str, layer: Path, base: Path = Path("/"), script: Path | None = None, *, volume: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run the stand-in for an engine with a *volume*, and return the completed process."""
    command: list[str | Path] = ["bash", ENGINE, what, layer, base, *([script] if script else [])]
    environment = {**os.environ, "VOLUME": volume}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)


def context_of(dockerfile: Path, checkout: Path, into: Path) -> Path:
    """Copy the build context to *into*: the files of git without those that .dockerignore excludes."""
    patterns = dockerfile.with_name(f"{dockerfile.name}.dockerignore").read_text(encoding="utf-8").splitlines()
    patterns = [line for line in patterns if line and not line.startswith("#")]
    listed = ["git", "ls-files", "-co", "--exclude-standard"]
    known = subprocess.run(listed, cwd=checkout, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in filter(None, known):
        if not _is_ignored(Path(name), patterns) and (checkout / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(checkout / name, into / name)
    return into


def _is_ignored(path: Path, patterns: Sequence[str]) -> bool:
    """Return whether *patterns* of a .dockerignore exclude *path*. The last matching pattern decides."""
    parts = [path.as_posix(), *(parent.as_posix() for parent in path.parents)]
    verdict = False
    for pattern in patterns:
        wanted = pattern.lstrip("!")
        names = [wanted] if not wanted.startswith("**/") else [wanted, wanted[3:]]
        if any(fnmatch.fnmatchcase(part, name) for part in parts for name in names):
            verdict = not pattern.startswith("!")
    return verdict


class Builder:
    """Executes the instructions of the stages in order, each into its own layer."""

    def __init__(self, *, context: Path, directory: Path, base: Path = Path(sys.base_prefix)) -> None:
        self.context = context
        self._base = base
        self._directory = directory
        self._layers: dict[str, Path] = {}
        self.environment: dict[str, str] = {}
        self.workdir = "/"

    def build(self, stages: Sequence[Stage]) -> Path:
        """Return the layer of the last stage."""
        layer = self._directory
        for number, ((_, source), *rest) in enumerate(stages):
            layer = self._directory / str(number)
            self._layers[source.partition(" AS ")[2] or str(number)] = layer
            self.environment, self.workdir = {}, "/"
            # Docker's Python images contain none
            self._run(layer, "find /usr/local/lib -name '*.pyc' -not -path '*/site-packages/*' -delete")
            for name, text in rest:
                self._carry_out(layer, name, text)
        return layer

    def words(self, image: Image) -> Mapping[str, str]:
        """Return the environment of a container of *image*, with its command and its user."""
        return {
            **self.environment,
            "WORKDIR": self.workdir,
            "IMAGE_USER": image.words["USER"][0],
            "HEALTH_COMMAND": " ".join(image.health_command),
            "COMMAND": " ".join(image.command),
            "PATH": self.environment["PATH"].replace("$PATH", "/usr/local/bin:/usr/bin:/bin"),
        }

    def _carry_out(self, layer: Path, name: str, text: str) -> None:
        if name == "ARG":
            key, _, value = text.partition("=")
            self.environment.setdefault(key, value.strip('"'))
        elif name == "ENV":
            self.environment |= {word.partition("=")[0]: word.partition("=")[2] for word in shlex.split(text)}
        elif name == "WORKDIR":
            self.workdir = text
            (layer / "root" / text.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif name == "COPY":
            self._copy(layer, shlex.split(text))
        elif name == "RUN":
            self._run(layer, text)

    def _copy(self, layer: Path, words: list[str]) -> None:
        at = self._layers[words.pop(0).partition("=")[2]] / "root" if words[0].startswith("--from=") else self.context
        *names, target = words
        into = layer / "root" / os.path.join(self.workdir, target).lstrip("/")  # noqa: PTH118  # an absolute one wins
        for name in names:
            found = at / name.lstrip("/")
            if found.is_dir():
                shutil.copytree(found, into, symlinks=True, dirs_exist_ok=True)
            else:
                (into if target.endswith("/") else into.parent).mkdir(parents=True, exist_ok=True)
                shutil.copy2(found, into)

    def _run(self, layer: Path, text: str) -> None:
        script = self._directory / "script/run.sh"
        script.parent.mkdir(exist_ok=True)
        exports = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in self.environment.items())
        script.write_text(f"{STAND_IN}\n{exports}cd {self.workdir} &&\n{text}\n", encoding="utf-8")
        done = engine("build", layer, self._base, script)
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"


def why_not_here(directory: Path) -> str | None:
    """Return the error if this machine cannot stand in for an engine with layers in *directory*, or None."""
    probe = engine("probe", directory / "probe")
    return None if probe.returncode == 0 else probe.stderr


def run_in_container(
    builder: Builder, image: Image, layer: Path, script: Path, directory: Path, *, volume: str
) -> dict[str, str]:
    """Run *script* in a container of *image* and return its facts. *directory* is mounted at /run/engine."""
    lines = [f"export {key}={shlex.quote(value)}\n" for key, value in builder.words(image).items()]
    (directory / "image.env").write_text("".join([STAND_IN, "\n", *lines]), encoding="utf-8")
    shutil.copy(script, directory)
    directory.chmod(0o755)  # the user of the image reads its configuration there
    done = engine("run", layer, Path(sys.base_prefix), directory / script.name, volume=volume)
    for name in ("err", "health"):  # shown when a test fails
        said = directory / name
        sys.stdout.write(said.read_text(encoding="utf-8")[-4000:] if said.exists() else "")
    sys.stdout.write(done.stdout + done.stderr)
    return dict(line.split("=", 1) for line in (directory / "facts").read_text(encoding="utf-8").splitlines())
