"""Runs the portal's two listeners on one event loop.

On Linux, the portal uses uvloop, which reduces the memory of an open TLS poll from 300 KB to 50 KB.

When the portal stops, it fails its readiness check, answers the open polls, closes the listeners, and finally closes
the database. To stop within five seconds, the portal aborts any connections that are still open.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
from uvicorn.server import HANDLED_SIGNALS

from bridge.clock import REAL_CLOCK, Clock
from bridge.config.trusted_keys import unusable_keys
from bridge.errors import BridgeError
from bridge.events.otel_resource import own_version
from bridge.http.failures import is_loopback
from bridge.logs import ThrottledLog
from bridge.portal.app import Application
from bridge.portal.audit import Entry
from bridge.portal.check_config import load_certificate
from bridge.portal.health import Health
from bridge.portal.http_limits import REQUEST_SECONDS, LimitedHttp
from bridge.portal.setting_checks import address_of
from bridge.portal.settings import PortalSettings, check_secrets
from bridge.portal.store.audit import add_entries
from bridge.portal.store.database import Store, StoreThreads
from bridge.system.systemd import SystemdNotifier

logger = logging.getLogger(__name__)

#: A running request must end within this time after a stop is requested.
_GRACE_SECONDS = 1.5
#: After this time, uvicorn aborts the remaining requests.
_LAST_SECONDS = 3
#: A small value, because uvicorn keeps the memory of a connection for this time after the client resets it.
_KEEP_ALIVE_SECONDS = 5
_BACKLOG = 2_048


class Portal:
    """Runs the portal. Any thread can call `stop` to end `run`."""

    def __init__(
        self, settings: PortalSettings, *, clock: Clock = REAL_CLOCK, request_seconds: float = REQUEST_SECONDS
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._request_seconds = request_seconds
        self._stopping = threading.Event()
        self.address: tuple[str, int] | None = None
        self.operator_address: tuple[str, int] | None = None
        self.is_up = threading.Event()

    def run(self) -> None:
        """Serve until `stop` is called. Raise BridgeError if the start fails."""
        logging.getLogger("alembic").setLevel(logging.WARNING)
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # uvicorn logs a warning for each malformed request
        check_secrets(self._settings)
        for sentence in unusable_keys([key.trusted() for key in self._settings.keys]):
            logger.warning("The portal ignores a key of [[keys]]: %s", sentence)
        server = self._settings.server
        if server.cert_file is not None:
            load_certificate(server)
        _allow_connections()
        _collect_garbage_rarely()
        with contextlib.ExitStack() as stack:
            store = stack.enter_context(contextlib.closing(Store.of_settings(self._settings)))
            before, now = store.migrate()
            if before != now:
                logger.info("The database was migrated.", extra={"before": before, "now": now})
            public = stack.enter_context(_bound("server.listen", server.listen))
            operator = stack.enter_context(_bound("operator.listen", self._settings.operator.listen))
            self.address, self.operator_address = public.getsockname()[:2], operator.getsockname()[:2]
            threads = StoreThreads(store)
            app = Application(self._settings, threads=threads, clock=self._clock)
            stack.callback(app.close)
            stack.callback(threads.close)
            _run(self._serve(app, public, operator))

    def stop(self) -> None:
        """End `run` within five seconds."""
        self._stopping.set()

    async def _serve(self, app: Application, public: socket.socket, operator: socket.socket) -> None:
        loop = asyncio.get_running_loop()

        def call_soon(function: Callable[[], object]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(function)

        if threading.current_thread() is threading.main_thread():  # only this thread receives signals
            for number in HANDLED_SIGNALS:
                signal.signal(number, lambda *_: call_soon(self.stop))
        await app.load()
        servers = self._servers(app)
        serving = [
            loop.create_task(server.serve(sockets=[bound]))
            for server, bound in zip(servers, (public, operator), strict=True)
        ]
        following = [loop.create_task(each()) for each in app.tasks]
        listener = app.site.store.store.kind.listener(partial(call_soon, app.site.pending_decisions.notify_new))
        try:
            started = Entry(actor="portal", action="started", subject="", details={"version": own_version()})
            await app.site.store.write(add_entries, [started], at=app.site.now())
            self._log_up()
            waiting = loop.create_task(asyncio.to_thread(self._stopping.wait))
            await asyncio.wait([waiting, *following, *serving], return_when=asyncio.FIRST_COMPLETED)
            for task in (*following, *serving):
                if task.done():
                    task.result()  # a task that has ended has failed, so this raises its error
        finally:
            self._stopping.set()
            app.stop()
            for task in following:
                task.cancel()
            for server in servers:
                server.stop()
            await asyncio.gather(*serving, return_exceptions=True)
            if listener is not None:
                await asyncio.to_thread(listener.stop)
        logger.info("The portal has stopped.")

    def _servers(self, app: Application) -> tuple[_Server, _Server]:
        log = ThrottledLog(logger, clock=self._clock)
        protocol = partial(LimitedHttp, request_seconds=self._request_seconds, metrics=app.site.metrics, log=log)
        files = self._settings.server
        tls = {} if files.cert_file is None else {"ssl_certfile": files.cert_file, "ssl_keyfile": files.key_file}
        host, _ = address_of(self._settings.operator.listen)
        health = Health(app.site, is_local=is_loopback(host), is_stopping=self._stopping.is_set)
        return _Server(app, http=partial(protocol, polls=app.polls), **tls), _Server(health, http=protocol)

    def _log_up(self) -> None:
        host, _ = self.address or ("", 0)
        scheme = "http" if self._settings.server.cert_file is None else "https"
        url, operator = f"{scheme}://{_host_and_port(self.address)}", _host_and_port(self.operator_address)
        logger.info("The portal is up.", extra={"url": url, "operator": operator, "version": own_version()})
        if scheme == "http" and not is_loopback(host):
            logger.warning(
                "server.listen is not a loopback address, and cert_file is not set. Agents use plain HTTP for loopback "
                "addresses only. Set cert_file, or put a proxy with TLS in front of the portal."
            )
        systemd = SystemdNotifier(os.environ)
        systemd.ready(f"Serving {url}")
        systemd.close()
        self.is_up.set()


class _Server(uvicorn.Server):
    """A uvicorn server that ignores signals."""

    def __init__(self, app: Any, **options: Any) -> None:
        config = uvicorn.Config(
            app,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_LAST_SECONDS,
            **options,
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        self.should_exit = True
        # A TLS connection closes only after a close message from the client, and many clients never send one.
        asyncio.get_running_loop().call_later(_GRACE_SECONDS, self._abort_connections)

    def _abort_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _run(main: Any) -> None:
    if sys.platform == "win32":
        asyncio.run(main)
    else:
        import uvloop  # noqa: PLC0415  # not on Windows

        uvloop.run(main)


def _collect_garbage_rarely() -> None:
    """Exclude loaded modules from garbage collection, and reduce full collections.

    With 5,000 connections, a full garbage collection blocks all polls for 250 ms. It is rarely necessary, because
    closed connections and answered polls do not leave reference cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 50)


def _allow_connections() -> None:
    """Raise the limit on open files to support many open polls."""
    if sys.platform != "win32":
        import resource  # noqa: PLC0415  # not on Windows

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _host_and_port(address: tuple[str, int] | None) -> str:
    host, port = address or ("", 0)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bound(key: str, listen: str) -> socket.socket:
    host, port = address_of(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise BridgeError(
            f"{key}: cannot listen on {host}:{port}: {error.strerror or error}. Free the port, or set another port."
        ) from error
