"""The Dockerfile: read by hadolint, and carried out without an engine, instruction by instruction.

No container engine runs where these tests do, and no image can be fetched there. So docker/engine.sh stands in for one:
each RUN line is executed as it stands, as root on an overlay of this machine's files with the Python of these tests at
/usr/local, where the base image has its own. What comes of it runs with a read-only root, as the image's user and
without capabilities. What that leaves open: the base image itself, and that an engine reads the file as we do.
"""

import email
import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(600)]

ENGINE = Path(__file__).parent / "docker/engine.sh"
CONTAINER = ENGINE.with_name("container.sh")
#: What the base image sets, or has said to the linker.
STAND_IN = "export PATH=/usr/local/bin:/usr/bin:/bin LD_LIBRARY_PATH=/usr/local/lib"
STATE = "/var/lib/scheduled-events-bridge"


def read_stages(text):
    """Return for each FROM its instructions, as (name, text) with continued lines joined."""
    lines = re.sub(r"(?m)^\s*#.*\n", "", text).replace("\\\n", " ")
    stages = [[]]
    for line in filter(str.strip, lines.splitlines()):
        name, _, rest = line.partition(" ")
        if name == "FROM":
            stages.append([])
        stages[-1].append((name, rest.strip()))
    return stages[1:]


class Image:
    """The final stage's instructions by name, each with the list of its texts."""

    def __init__(self, stages):
        self.stages = stages
        self.words = {}
        for name, text in stages[-1]:
            self.words.setdefault(name, []).append(text)

    @property
    def health_command(self):
        return json.loads(self.words["HEALTHCHECK"][0].partition("CMD ")[2])


@pytest.fixture(scope="module")
def dockerfile(deploy):
    return deploy / "docker/Dockerfile"


@pytest.fixture(scope="module")
def image(dockerfile):
    return Image(read_stages(dockerfile.read_text()))


# ---- what it says ---------------------------------------------------------------------------------------------------


def test_hadolint_has_nothing_to_say(tool, dockerfile):
    done = subprocess.run([tool("hadolint"), dockerfile], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert "hadolint" not in dockerfile.read_text()  # nor was it told to ignore anything


def test_base_is_pinned(dockerfile):
    said = re.search(r"(?m)^ARG BASE=(\S+)$", dockerfile.read_text())
    assert said
    assert re.fullmatch(r"\S+/python:3\.1[0-3]\.\d+-slim-\w+", said[1])


def test_it_runs_as_a_number_that_is_not_root(image):
    assert all(int(part) >= 10_000 for part in image.words["USER"][0].split(":"))


def test_entry_point_is_no_shell(image):
    assert json.loads(image.words["ENTRYPOINT"][0])[0].startswith("/opt/")
    assert json.loads(image.words["CMD"][0]) == ["run"]
    assert image.words["STOPSIGNAL"] == ["SIGTERM"]


def test_example_in_its_header_fits_the_image(dockerfile, image):
    header = dockerfile.read_text().partition("ARG ")[0].replace("#", "").replace("\\\n", " ")
    words = shlex.split(re.search(r"docker run .*", header)[0])
    assert {"--read-only", "--init", "ALL", "no-new-privileges", "max-size=10m"} <= set(words)
    volumes = [word.split(":") for word in words if ":/" in word]
    assert [volume[1] for volume in volumes] == [*image.words["VOLUME"], "/etc/scheduled-events-bridge"]
    assert int(words[words.index("--stop-timeout") + 1]) >= 11
    assert words[-1].startswith("scheduled-events-bridge:")


# ---- what comes of it -----------------------------------------------------------------------------------------------


def engine(what, layer, base=Path("/"), script=None):
    """Run the stand-in for an engine; return how it ended."""
    command = ["bash", ENGINE, what, layer, base, *([script] if script else [])]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)


def ignored(path, patterns):
    """Return whether a .dockerignore of *patterns* keeps *path* from the builder; the last that fits decides."""
    parts = [path.as_posix(), *(parent.as_posix() for parent in path.parents)]
    verdict = False
    for pattern in patterns:
        wanted = pattern.lstrip("!")
        names = [wanted] if not wanted.startswith("**/") else [wanted, wanted[3:]]
        if any(fnmatch.fnmatchcase(part, name) for part in parts for name in names):
            verdict = not pattern.startswith("!")
    return verdict


class Builder:
    """Carries out the instructions of one stage after the other, each into a layer of its own."""

    def __init__(self, *, context, base, directory):
        self._context = context
        self._base = base
        self._directory = directory
        self._layers = {}
        self.environment = {}
        self.workdir = "/"

    def build(self, stages):
        """Return the layer of the last stage."""
        for number, ((_, source), *rest) in enumerate(stages):
            layer = self._directory / str(number)
            self._layers[source.partition(" AS ")[2] or str(number)] = layer
            self.environment, self.workdir = {}, "/"
            # Docker's python images hold none
            self._run(layer, "find /usr/local/lib -name '*.pyc' -not -path '*/site-packages/*' -delete")
            for name, text in rest:
                self._carry_out(layer, name, text)
        return layer

    def _carry_out(self, layer, name, text):
        if name == "ARG":
            key, _, value = text.partition("=")
            self.environment.setdefault(key, value.strip('"'))
        elif name == "ENV":
            self.environment |= dict(word.split("=", 1) for word in shlex.split(text))
        elif name == "WORKDIR":
            self.workdir = text
            (layer / "root" / text.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif name == "COPY":
            self._copy(layer, shlex.split(text))
        elif name == "RUN":
            self._run(layer, text)

    def _copy(self, layer, words):
        source, at = self._context, None
        if words[0].startswith("--from="):
            at = self._layers[words.pop(0).partition("=")[2]] / "root"
        *names, target = words
        into = layer / "root" / os.path.join(self.workdir, target).lstrip("/")  # noqa: PTH118  # an absolute one wins
        for name in names:
            found = (at or source) / name.lstrip("/")
            if found.is_dir():
                shutil.copytree(found, into, symlinks=True, dirs_exist_ok=True)
            else:
                (into if target.endswith("/") else into.parent).mkdir(parents=True, exist_ok=True)
                shutil.copy2(found, into)

    def _run(self, layer, text):
        script = self._directory / "script/run.sh"
        script.parent.mkdir(exist_ok=True)
        exports = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in self.environment.items())
        script.write_text(f"{STAND_IN}\n{exports}cd {self.workdir} &&\n{text}\n")
        done = engine("build", layer, self._base, script)
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"


@pytest.fixture(scope="module")
def layers(tool, unable, tmp_path_factory):
    """Return a directory for the layers of an image, on a machine that can stand in for an engine."""
    for name in ("unshare", "setpriv", "ip"):
        tool(name)
    directory = tmp_path_factory.mktemp("docker")
    probe = engine("probe", directory / "probe")
    if probe.returncode != 0:
        unable("no namespaces and overlays stand in for a container engine here", probe.stderr)
    if Path(sys.base_prefix) == Path("/usr") or sys.version_info < (3, 11):
        # The Python of a distribution cannot be laid over /usr/local: no tool that is missing, so nobody is to blame.
        pytest.skip("these tests' Python cannot stand in for the base image's: it needs 3.11 and a prefix of its own")
    return directory


@pytest.fixture(scope="module")
def built(dockerfile, image, checkout, layers):
    """Return the builder, the layer of the image, and what its containers said of themselves."""
    patterns = dockerfile.with_name("Dockerfile.dockerignore").read_text().splitlines()
    patterns = [line for line in patterns if line and not line.startswith("#")]
    known = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=checkout, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    context = layers / "context"
    for name in filter(None, known):
        if not ignored(Path(name), patterns) and (checkout / name).is_file():
            (context / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(checkout / name, context / name)
    builder = Builder(context=context, base=Path(sys.base_prefix), directory=layers)
    layer = builder.build(image.stages)
    return builder, layer, context


@pytest.fixture(scope="module")
def facts(built, image, tmp_path_factory):
    builder, layer, _ = built
    directory = tmp_path_factory.mktemp("container")
    words = {
        **builder.environment,
        "WORKDIR": builder.workdir,
        "IMAGE_USER": image.words["USER"][0],
        "HEALTH_COMMAND": " ".join(image.health_command),
        "AGENT_COMMAND": " ".join(json.loads(image.words["ENTRYPOINT"][0]) + json.loads(image.words["CMD"][0])),
        "PATH": builder.environment["PATH"].replace("$PATH", "/usr/local/bin:/usr/bin:/bin"),
    }
    lines = [f"export {key}={shlex.quote(value)}\n" for key, value in words.items()]
    (directory / "image.env").write_text("".join([STAND_IN, "\n", *lines]))
    shutil.copy(CONTAINER, directory)
    directory.chmod(0o755)  # the image's user reads its configuration there
    done = engine("run", layer, Path(sys.base_prefix), directory / CONTAINER.name)
    for name in ("err", "health"):  # shown when a test fails
        sys.stdout.write((directory / name).read_text()[-4000:] if (directory / name).exists() else "")
    sys.stdout.write(done.stdout + done.stderr)
    return dict(line.split("=", 1) for line in (directory / "facts").read_text().splitlines())


def test_nothing_goes_to_the_builder_that_is_not_needed(built):
    _, _, context = built
    assert {path.name for path in context.iterdir()} == {
        "bridge",
        "sinks",
        "deploy",
        "pyproject.toml",
        "README.md",
        "LICENSE",
    }
    held = {path.name for path in (context / "deploy").rglob("*") if path.is_file()}
    assert held == {"healthcheck.py", "drain.py", "requirements.txt"}


def test_everything_is_compiled_and_believed_whatever_its_time(built):
    _, layer, _ = built
    for package in ("root/opt/scheduled-events-bridge/venv/lib", "local/lib"):
        compiled = [path for path in (layer / package).rglob("*.pyc") if "opt-" not in path.name and path.is_file()]
        assert len(compiled) > 200, package
        # PEP 552: 1 is "by hash, never looked at"
        assert {int.from_bytes(path.read_bytes()[4:8], "little") for path in compiled} == {1}
    modules = list((layer / "root/opt/scheduled-events-bridge/venv/lib").glob("python*/site-packages/bridge/*.py"))
    assert all(list(path.parent.glob(f"__pycache__/{path.stem}.*.pyc")) for path in modules)


def test_image_has_no_installer_in_its_venv(built):
    _, layer, _ = built
    venv = layer / "root/opt/scheduled-events-bridge/venv"
    assert (venv / "bin/scheduled-events-bridge").exists()
    assert not list(venv.glob("lib/python*/site-packages/pip"))


def test_every_library_of_the_image_has_the_version_of_the_lock(built, deploy):
    _, layer, _ = built
    lock = (deploy / "artifact/requirements.txt").read_text()
    locked = set(re.findall(r"(?m)^([a-z0-9-]+==[^ ]+)", lock))
    found = (layer / "root/opt/scheduled-events-bridge/venv/lib").glob("python*/site-packages/*.dist-info/METADATA")
    pins = set()
    for metadata in found:
        said = email.message_from_string(metadata.read_text())
        pins.add(f"{re.sub('[-_.]+', '-', said['Name']).lower()}=={said['Version']}")
    pins -= {pin for pin in pins if pin.startswith("scheduled-events-bridge==")}
    assert len(pins) > 15
    assert pins - locked == set()
    assert not [pin for pin in pins if pin.startswith(("apprise==", "aiohttp=="))]  # of extras that nobody asked for


def test_state_directory_belongs_to_the_user_alone(built):
    _, layer, _ = built
    status = (layer / f"root{STATE}").stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (10001, 10001, 0o700)


def test_agent_works_on_a_read_only_root_without_rights(facts):
    assert facts["root_is_read_only"] == "yes"
    assert facts["user"] == "10001"
    assert int(facts["capabilities"], 16) == 0
    assert facts["record_on_standard_output"] == "yes"
    assert facts["state"] == "10001:600"
    assert facts["stop"] == "0"


def test_health_check_tells_a_healthy_agent_from_a_hung_and_a_dead_one(facts):
    assert facts["unhealthy_before_the_agent_runs"] == "1"
    assert facts["healthy"] == "yes"
    assert facts["unhealthy_while_it_hangs"] == "1"
    assert facts["healthy_again"] == "yes"
    assert facts["unhealthy_once_it_is_gone"] == "1"


def test_health_check_follows_the_configuration(facts):
    assert facts["healthy_where_the_configuration_says"] == "yes"
    assert facts["healthy_where_the_environment_says"] == "yes"
    assert facts["not_called_ill_for_a_broken_file"] == "0"
    assert facts["not_called_ill_without_a_listener"] == "0"


def test_stand_in_for_an_engine_is_clean(tool):
    command = [tool("shellcheck"), "--exclude=SC1091,SC2086", "--shell=sh", CONTAINER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
    done = subprocess.run([tool("shellcheck"), ENGINE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
