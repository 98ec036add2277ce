"""Defines the roles of people. A role can be limited to a scope: a set of VM groups.

A person can have several grants. A viewer sees the events of the VMs in the scope. An approver can also decide on these
events. An operator manages users. Operators cannot approve, even if they are also approvers. Otherwise, they could
enable a second account and approve twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import Enum

import msgspec

_GROUP = re.compile(r"(resource_group|labels\.[^:]+):.+", re.DOTALL)


class Role(str, Enum):
    """The permission of a person."""

    VIEWER = "viewer"
    APPROVER = "approver"
    OPERATOR = "operator"


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """A role for the VMs of a scope."""

    role: Role
    scope: tuple[str, ...] = ()
    """Groups of VMs, such as ``labels.team:payments``. An empty scope means all VMs."""


def scope_of(grants: Iterable[Grant], *roles: Role) -> tuple[str, ...] | None:
    """Return the combined scope of the grants with one of *roles*.

    () means all VMs, and None means no grant.
    """
    scopes = [grant.scope for grant in grants if grant.role in roles]
    if not scopes:
        return None
    return () if () in scopes else tuple(dict.fromkeys(group for scope in scopes for group in scope))


def can_approve(grants: Iterable[Grant]) -> bool:
    """Return whether *grants* allow a person to approve events of at least one VM."""
    roles = {grant.role for grant in grants}
    return Role.APPROVER in roles and Role.OPERATOR not in roles


def group_names(resource_group: str | None, labels: Mapping[str, object]) -> list[str]:
    """Return the groups of a VM in their stored form."""
    group = [f"resource_group:{resource_group.casefold()}"] if resource_group else []
    return [*group, *(f"labels.{name}:{value}" for name, value in sorted(labels.items()))]


def scope_group(text: str) -> str:
    """Return a group of a scope in its stored form. Raise ValueError if *text* is not a group."""
    if not _GROUP.fullmatch(text):
        raise ValueError(f"{text!r} is not a scope. Use resource_group:NAME or labels.NAME:VALUE.")
    return text.casefold() if text.startswith("resource_group:") else text
