"""/serving of a running agent, behind the nginx and HAProxy configurations of the documentation page."""

import re
import shutil
import socket
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import requests

from bridge.testing import EventSpec
from bridge.testing.http_contract import Answer, HttpPeer

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "load-balancer.md").read_text()
HAPROXY, NGINX = shutil.which("haproxy"), shutil.which("nginx")
REBOOT = EventSpec(event_type="Reboot", impact_seconds=1e6)
_CHECKS_SECONDS = 2.0
"""Two check intervals of the documented configuration."""


def block(name):
    [found] = re.findall(rf"<!-- {name} -->\n```\w*\n(.*?)```", PAGE, re.DOTALL)
    return found


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Site:
    """An agent with /serving, and the load balancers in front of it."""

    def __init__(self, agent, azure, directory):
        self.agent, self.azure, self.directory = agent, azure, directory
        self.serving_port, self.app_port = free_port(), free_port()
        self.processes = []
        serving = f'[serving]\nlisten = "127.0.0.1:{self.serving_port}"\n'
        agent.configure(azure.endpoint, f'{serving}[[sinks]]\ntype = "stdout"\n')

    def serving(self, **headers):
        return requests.get(f"http://127.0.0.1:{self.serving_port}/serving", headers=headers, timeout=5)

    def is_serving(self, status):
        try:
            return self.serving().status_code == status
        except requests.ConnectionError:
            return False

    def health(self):
        return requests.get(f"http://127.0.0.1:{self.app_port}/health", timeout=5).status_code

    def run(self, *command):
        self.processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    def start_nginx(self):
        site = block("nginx").replace("listen 80;", f"listen 127.0.0.1:{self.app_port};")
        site = site.replace(":9465/", f":{self.serving_port}/").replace(
            "root /usr/share/nginx/html;", 'return 200 "vm";'
        )
        temporary = "".join(
            f"{name}_temp_path {self.directory}/{name};\n"
            for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        http = f"http {{\naccess_log off;\n{temporary}{site}}}\n"
        text = f"daemon off;\npid {self.directory}/nginx.pid;\nevents {{}}\n{http}"
        (self.directory / "nginx.conf").write_text(text)
        self.run(NGINX, "-p", self.directory, "-c", self.directory / "nginx.conf", "-e", self.directory / "nginx.log")
        self.agent.wait_for(lambda: _responds(self.app_port))

    def start_haproxy(self, other_port):
        port = free_port()
        backend = block("haproxy").replace("10.0.0.4:80", f"127.0.0.1:{self.app_port}")
        backend = backend.replace("10.0.0.5:80", f"127.0.0.1:{other_port}")
        limits = "defaults\nmode http\ntimeout connect 2s\ntimeout client 5s\ntimeout server 5s\n"
        front = f"frontend all\nbind 127.0.0.1:{port}\ndefault_backend web\n"
        (self.directory / "haproxy.cfg").write_text(limits + front + backend)
        self.run(HAPROXY, "-db", "-f", self.directory / "haproxy.cfg")
        self.agent.wait_for(lambda: _responds(port))
        return port

    def close(self):
        for process in self.processes:
            process.terminate()
            process.wait(20)


def _responds(port):
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


@pytest.fixture
def site(agent, azure, tmp_path):
    made = Site(agent, azure, tmp_path)
    yield made
    made.close()


@pytest.fixture
def other_vm():
    with HttpPeer(accepted=Answer(body=b"other")) as peer:
        yield peer.address.port


def test_serving_reports_503_during_an_event_and_after_an_agent_restart(site):
    site.agent.start()
    site.agent.wait_for(lambda: site.is_serving(200))
    event_id = site.azure.world.add_event(REBOOT)
    site.agent.wait_for(lambda: site.is_serving(503))
    response = site.serving(Host="balancer.example.net")
    assert (response.status_code, response.text) == (503, f"Reboot {event_id} is Scheduled.\n")
    site.azure.world.update(event_id, event_type="Freeze")
    site.agent.wait_for(lambda: len(site.agent.records) == 2)
    assert site.agent.stop() == 0
    site.agent.start()
    site.agent.wait_for(lambda: _responds(site.serving_port))
    assert site.serving().status_code == 503
    site.azure.world.start(event_id)
    site.agent.wait_for(lambda: len(site.agent.records) == 3)
    assert site.serving().status_code == 503
    site.azure.world.complete(event_id)
    site.agent.wait_for(lambda: site.is_serving(200))
    assert requests.get(f"http://127.0.0.1:{site.serving_port}/metrics", timeout=5).status_code == 404
    assert site.agent.stop() == 0


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt-get install nginx")
def test_nginx_returns_503_during_an_event_and_200_during_an_agent_upgrade(site):
    site.start_nginx()
    assert site.health() == 200
    site.agent.start()
    site.agent.wait_for(lambda: site.is_serving(200))
    assert site.health() == 200
    event_id = site.azure.world.add_event(REBOOT)
    site.agent.wait_for(lambda: site.is_serving(503))
    assert site.health() == 503
    site.azure.world.start(event_id)
    site.agent.wait_for(lambda: len(site.agent.records) == 2)
    site.azure.world.complete(event_id)
    site.agent.wait_for(lambda: site.is_serving(200))
    answers = []
    asking = threading.Event()

    def ask():
        while not asking.wait(0.02):
            answers.append(site.health())

    thread = threading.Thread(target=ask)
    thread.start()
    assert site.agent.stop() == 0  # an upgrade stops the old version and starts the new one
    assert site.health() == 200
    site.agent.start()
    site.agent.wait_for(lambda: site.is_serving(200))
    asking.set()
    thread.join()
    assert set(answers) == {200}
    assert site.agent.stop() == 0


@pytest.mark.skipif(not (HAPROXY and NGINX), reason="apt-get install haproxy nginx")
def test_haproxy_sends_no_new_request_to_the_vm_after_two_check_intervals(site, other_vm):
    site.start_nginx()
    port = site.start_haproxy(other_vm)

    def visited(requests_count=40):
        return Counter(requests.get(f"http://127.0.0.1:{port}/", timeout=5).text for _ in range(requests_count))

    site.agent.start()
    site.agent.wait_for(lambda: set(visited(4)) == {"vm", "other"})
    event_id = site.azure.world.add_event(REBOOT)
    site.agent.wait_for(lambda: site.health() == 503)
    time.sleep(_CHECKS_SECONDS + 0.5)  # The documentation guarantees this interval.
    assert set(visited()) == {"other"}
    site.azure.world.start(event_id)
    site.agent.wait_for(lambda: len(site.agent.records) == 2)
    site.azure.world.complete(event_id)
    site.agent.wait_for(lambda: set(visited(4)) == {"vm", "other"})
    assert site.agent.stop() == 0
