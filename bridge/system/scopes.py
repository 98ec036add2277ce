"""Checks an Entra ID scope without importing ssl, which `access_tokens` imports."""

from __future__ import annotations


def check_scope(scope: str) -> None:
    """Raise ValueError if *scope* is not a valid scope."""
    if not scope or any(map(str.isspace, scope)):
        raise ValueError('one scope, such as "api://scheduled-events-portal/.default"')
