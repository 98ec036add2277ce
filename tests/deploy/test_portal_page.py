"""The commands of the operator page of the portal, in order, with ExecStart of the unit under another user.

A stand-in for systemctl follows the unit in a temporary directory: it copies the credentials and runs ExecStart. The
user can read everything, because root owns the directory, but can write only to the state directory.
"""

import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from desk import Desk
from held_port import held_port
from private_ca import PrivateCa

pytest.importorskip("sqlalchemy", reason="the extra [portal] is not installed")


import bridge

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(300)]

PAGE = "docs/operate/portal.md"
NAME = "scheduled-events-portal"
PASSWORD = "correct horse battery\n"  # of a test
NOBODY = 65_534

AS_NOBODY = (
    f"setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups --no-new-privs --inh-caps=-all,+dac_read_search "
    "--ambient-caps=-all,+dac_read_search --bounding-set=-all,+dac_read_search --"
)
RUNUSER = """#!/bin/bash
[[ $1 == -u && $2 == scheduled-events-portal && $3 == -- ]] || exit 1
shift 3
exec {as_user} "$@"
"""
SYSTEMCTL = """#!/bin/bash
set -eu
start() {{
  install -d -m 0755 {credentials}
  for each in $(cat {unit} {unit}.d/*.conf 2>/dev/null | sed -n 's/^LoadCredential=//p'); do
    install -m {mode} "${{each#*:}}" {credentials}/"${{each%%:*}}"
  done
  {as_user} $(sed -n 's/^ExecStart=//p' {unit}) </dev/null >>{home}/journal 2>&1 &
  echo $! >{home}/pid
  until curl -fsS http://{operator}/readyz >/dev/null 2>&1; do
    kill -0 $! 2>/dev/null || {{ wait $! || exit $?; }}
    sleep 0.1
  done
}}
stop() {{
  kill -TERM "$(cat {home}/pid)"
  while kill -0 "$(cat {home}/pid)" 2>/dev/null; do sleep 0.05; done
}}
case $* in
  daemon-reload) ;;
  "enable --now {name}" | "start {name}") start ;;
  "stop {name}") stop ;;
  "restart {name}") stop; start ;;
  *) echo "What is systemctl $*?" >&2; exit 1 ;;
esac
"""


@pytest.fixture(scope="module")
def desk(tool, deploy, tmp_path_factory, clean_environment):
    home = tmp_path_factory.mktemp("machine")
    with ExitStack() as stack:
        portal, operator = (f"127.0.0.1:{stack.enter_context(held_port())}" for _ in range(2))
        elsewhere = {
            "/etc/": f"{home}/etc/",
            f"/opt/{NAME}": f"{home}/opt",
            f"/var/lib/{NAME}": f"{home}/state",
            f"/run/credentials/{NAME}.service": f"{home}/credentials",
            "127.0.0.1:8443": portal,
            "0.0.0.0:8443": portal,
            "127.0.0.1:9465": operator,
            "$(date +%F)": "2026-11-20",
        }
        desk = Desk(PAGE, home, clean_environment, elsewhere)
        desk.port = portal.rpartition(":")[2]
        as_user = AS_NOBODY if os.geteuid() == 0 else ""
        if as_user:
            tool("setpriv")
            closed = [each for each in Path(bridge.__file__).parents if not each.stat().st_mode & 0o001]
            if closed:  # Alembic finds its folder with access(2), which ignores capabilities
                pytest.skip(f"other users cannot access the installation: {closed[0]}")
        words = {
            "as_user": as_user, "home": home, "operator": operator, "name": NAME,
            "mode": "0440" if as_user else "0400",  # only the owner reads a private key
            "credentials": home / "credentials", "unit": home / f"etc/systemd/system/{NAME}.service",
        }  # fmt: skip
        for name, text in {"systemctl": SYSTEMCTL, "runuser": RUNUSER, "systemd-sysusers": "#!/bin/sh\n"}.items():
            path = home / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text.format(**words))
            path.chmod(0o755)
        for name in ("etc/systemd/system", "etc/sysusers.d", "opt/venvs", "state", "deploy/portal/systemd"):
            (home / name).mkdir(parents=True)
        if as_user:
            os.chown(home / "state", NOBODY, NOBODY)
        for path in (deploy / "portal/systemd").iterdir():
            text = path.read_text()
            for said, here in elsewhere.items():
                text = text.replace(said, here)
            (home / "deploy/portal/systemd" / path.name).write_text(text)
        for version in ("0.1.0", "0.2.0"):  # both are this installation
            (home / "opt/venvs" / version).symlink_to(sys.prefix)
        (home / "opt/venv").symlink_to("venvs/0.1.0")
        desk.environment |= {
            "PATH": f"{home}/bin:{desk.environment['PATH']}",
            "SCHEDULED_EVENTS_PORTAL_CONFIG": f"{home}/etc/{NAME}/portal.toml",
            "STATE_DIRECTORY": f"{home}/state",
        }
        try:
            yield desk
        finally:
            pid = home / "pid"
            if pid.exists():
                subprocess.run(["kill", "-KILL", pid.read_text().strip()], check=False)


def test_documented_commands_run_back_up_restore_upgrade_and_roll_back(desk):
    home = desk.home

    def do(mark, typed=""):
        return desk.do(desk.text(f"portal service: {mark}"), typed)

    do("set up")
    assert (home / f"etc/sysusers.d/{NAME}.conf").exists()
    assert "portal-2026" in do("secrets")
    assert '"ready"' in do("start")
    assert _owner_of_the_process(home) in {NOBODY, os.geteuid()} - {0}
    assert "ann  approver  all VMs" in do("people", PASSWORD)
    do("backup")
    copy = home / "state/backups/2026-11-20.db"
    assert copy.stat().st_mode & 0o777 == 0o600
    assert "entries are valid" in do("try the backup")
    people = desk.text("portal service: people").splitlines()
    desk.do("\n".join(people[:3]).replace("ann", "bob"), PASSWORD)
    do("restore")
    listed = desk.do("\n".join([*people[:2], people[3]]))
    assert ("ann" in listed, "bob" in listed) == (True, False)
    assert (home / "state/before/portal.db").exists()
    printed = do("audit")
    assert "entries are valid" in printed
    assert "user_added" in (home / "audit-2026-11-20.csv").read_text()
    do("rotate")
    secrets = (home / f"etc/{NAME}/private/agents.secret").read_text().splitlines()
    assert [len(each) for each in secrets] == [44, 44]
    assert (home / "credentials/agents.secret").read_text().splitlines() == secrets
    do("upgrade")
    assert (home / "state/before-0.2.0.db").exists()
    assert os.readlink(home / "opt/venv") == "venvs/0.2.0"  # noqa: PTH115  # as the page has it
    do("back")
    assert os.readlink(home / "opt/venv") == "venvs/0.1.0"  # noqa: PTH115
    assert '"ready"' in desk.do("curl -fsS " + desk.text("portal service: start").partition("curl -fsS ")[2])
    files = PrivateCa(home / "ca").issue("localhost")
    for name, path in {"tls.crt": files.cert_file, "tls.key": files.key_file}.items():
        (home / name).write_bytes(path.read_bytes())
    do("TLS")
    door = f"https://localhost:{desk.port}/login"
    assert "<form" in desk.do(f"curl -fsS --cacert {home}/ca/ca.pem {door}")
    assert (home / "journal").read_text().count('"The portal is up."') == 6
    assert "WARNING" not in (home / "journal").read_text()


def _owner_of_the_process(home):
    until = time.monotonic() + 20
    pid = (home / "pid").read_text().strip()
    while time.monotonic() < until:
        said = re.search(r"^Uid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        if said and int(said[1]):
            return int(said[1])
        time.sleep(0.05)
    return 0
