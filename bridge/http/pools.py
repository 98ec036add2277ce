"""Defines urllib3 connections whose sockets the watchdog can shut down.

The IMDS poll does not import this module, because importing urllib3 would take a third of the startup time.
"""

from __future__ import annotations

import socket
from typing import Any

from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import ConnectTimeoutError, LocationParseError, NameResolutionError, NewConnectionError

from bridge.http.watchdog import Watched, connected_socket, in_flight


class _WatchedConnection(Watched, HTTPConnection):
    def _new_conn(self) -> socket.socket:
        call = in_flight.call
        if call is None:
            return super()._new_conn()
        try:
            connected = connected_socket(call, self._dns_host, self.port)
        except socket.gaierror as exc:
            raise NameResolutionError(self._dns_host, self, exc) from exc
        except UnicodeError:
            raise LocationParseError(self.host) from None
        except TimeoutError as exc:
            raise ConnectTimeoutError(self, f"Connection to {self.host} timed out.") from exc
        except OSError as exc:
            raise NewConnectionError(self, f"Failed to establish a new connection: {exc}") from exc
        self.watch_new(call, connected)
        return connected

    def request(self, *args: Any, **kwargs: Any) -> None:
        call = in_flight.call
        if call is not None and self.sock is not None:
            self.watch(call)
        super().request(*args, **kwargs)


class _WatchedTlsConnection(_WatchedConnection, HTTPSConnection):
    """A watched connection with TLS."""


class _WatchedPool(HTTPConnectionPool):
    ConnectionCls = _WatchedConnection


class _WatchedTlsPool(HTTPSConnectionPool):
    ConnectionCls = _WatchedTlsConnection


POOL_CLASSES = {"http": _WatchedPool, "https": _WatchedTlsPool}
