"""Stands in for pywin32's module of this name where there is no Windows."""

from __future__ import annotations


class error(Exception):  # noqa: N801  # its name there
    """What a call of Windows raises."""

    def __init__(self, winerror: int, funcname: str, strerror: str) -> None:
        super().__init__(winerror, funcname, strerror)
        self.winerror, self.funcname, self.strerror = winerror, funcname, strerror
