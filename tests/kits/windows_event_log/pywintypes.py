"""Stands in for pywin32's module of this name on machines without Windows."""

from __future__ import annotations


class error(Exception):  # noqa: N801  # its name there
    """The exception of a Windows call."""

    def __init__(self, winerror: int, funcname: str, strerror: str) -> None:
        super().__init__(winerror, funcname, strerror)
        self.winerror, self.funcname, self.strerror = winerror, funcname, strerror
