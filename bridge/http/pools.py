"""urllib3's connections and pools, with sockets that the watchdog can shut down.

They are separate from `bridge.http.watchdog`, so that a poll does not import urllib3, which takes a third of a start.
"""

from __future__ import annotations

import socket
from typing import Any

from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import ConnectTimeoutError, LocationParseError, NameResolutionError, NewConnectionError

from bridge.http.watchdog import Call, Watched, address_shares, current_call


class _WatchedConnection(Watched, HTTPConnection):
    def _new_conn(self) -> socket.socket:
        call = current_call()
        if call is None:
            return super()._new_conn()
        connected = self._connect(call)
        self.watch_new(call, connected)
        return connected

    def request(self, *args: Any, **kwargs: Any) -> None:
        call = current_call()
        if call is not None and self.sock is not None:
            self.watch(call)
        super().request(*args, **kwargs)

    def _connect(self, call: Call) -> socket.socket:
        name = self._dns_host
        error: Exception = LocationParseError(self.host)
        try:
            for address, seconds in address_shares(call, name, self.port):
                self._dns_host, self.timeout = address, seconds
                try:
                    return super()._new_conn()
                except (ConnectTimeoutError, NewConnectionError) as exc:
                    error = exc
        except socket.gaierror as exc:
            error = NameResolutionError(name, self, exc)
        except UnicodeError:
            pass
        finally:
            self._dns_host = name
        raise error


class _WatchedTlsConnection(_WatchedConnection, HTTPSConnection):
    """The same with TLS."""


class _WatchedPool(HTTPConnectionPool):
    ConnectionCls = _WatchedConnection


class _WatchedTlsPool(HTTPSConnectionPool):
    ConnectionCls = _WatchedTlsConnection


POOL_CLASSES = {"http": _WatchedPool, "https": _WatchedTlsPool}
