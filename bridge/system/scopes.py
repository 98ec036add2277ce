"""The check of an Entra ID scope. It is a separate module, so that reading a configuration does not import requests."""

from __future__ import annotations


def check_scope(scope: str) -> None:
    """Raise ValueError with the expected value if *scope* is not a scope."""
    if not scope or any(map(str.isspace, scope)):
        raise ValueError('one scope, such as "api://scheduled-events-portal/.default"')
