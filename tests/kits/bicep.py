"""Reads Bicep files without the compiler: the tree of tree-sitter-bicep, and literal values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

AZURE = Path(__file__).parents[2] / "deploy" / "azure"

Node = Any
"""A node of the tree. Its library is installed only for the tests of deploy/."""

UNKNOWN = object()
"""The value of an expression that only Azure can evaluate."""


def text(node: Node) -> str:
    """Return the source text of the node."""
    return str(node.text.decode())


def nodes(node: Node, *types: str) -> Iterator[Node]:
    """Yield *node* and its descendants of *types*, in order."""
    if node.type in types:
        yield node
    for child in node.children:
        yield from nodes(child, *types)


def literal(node: Node) -> Any:
    """Return the literal value of *node*, or UNKNOWN."""
    if node.type == "string":
        is_literal = not any(child.type == "interpolation" for child in node.children)
        return text(node)[1:-1].replace("\\'", "'") if is_literal else UNKNOWN
    if node.type == "number":
        return int(text(node))
    if node.type in {"boolean", "null"}:
        return {"true": True, "false": False, "null": None}[text(node)]
    return UNKNOWN


def properties(node: Node) -> dict[Any, Node]:
    """Return the properties of an object node by name. A computed name is UNKNOWN."""
    found: dict[Any, Node] = {}
    for child in node.named_children:
        if child.type == "object_property":
            key, value = (part for part in child.named_children if part.type != "comment")
            name = literal(key) if key.type == "string" else text(key)
            assert name is UNKNOWN or name not in found, f"{name} is a duplicate property"
            found[name] = value
    return found


def plain(node: Node) -> Any:
    """Return an object or array node as a Python value, with UNKNOWN for every expression."""
    if node.type == "object":
        return {name: plain(value) for name, value in properties(node).items()}
    if node.type == "array":
        return [plain(child) for child in node.named_children if child.type != "comment"]
    return literal(node)


def declared(root: Node, kind: str) -> dict[str, Node]:
    """Return the declarations of a *kind* (parameter, variable, resource, module, output) by name."""
    found: dict[str, Node] = {}
    for node in nodes(root, f"{kind}_declaration"):
        name = text(node.named_children[0])
        assert name not in found, f"{name} is declared twice"
        found[name] = node
    return found


def body(declaration: Node) -> Node:
    """Return the object of a resource or module, also inside a loop."""
    return next(nodes(declaration, "object"))


def decorators(root: Node, parameter: str) -> dict[str, Any]:
    """Return the arguments of the decorators of *parameter*."""
    before = declared(root, "parameter")[parameter].prev_named_sibling
    calls = nodes(before, "call_expression") if before is not None and before.type == "decorators" else ()
    given = {text(call.named_children[0]): call.named_children[1].named_children for call in calls}
    return {name: plain(arguments[0]) if arguments else True for name, arguments in given.items()}
