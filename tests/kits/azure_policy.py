"""A small Azure Policy engine that evaluates a deployIfNotExists rule and applies the template of the rule.

The engine supports only the language features in deploy/azure/fleet. Any other feature raises ValueError. The
conditions follow Microsoft's "Azure Policy definition structure", and the functions follow "ARM template functions".
String comparisons ignore case, as in Azure. A deployment (`put`) adds an application resource to the applications of a
VM, and replaces the list of a scale set.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

Json = Any
Scope = Mapping[str, Callable[..., Json]]

TOKEN = re.compile(r"\s*(?:(?P<text>'(?:[^']|'')*')|(?P<number>-?\d+)|(?P<name>\w+)|(?P<mark>[()\[\].,]))")


class Expression:
    """One ARM expression, the text between its outer brackets."""

    def __init__(self, text: str, scope: Scope) -> None:
        """Parse *text*. *scope* has the context-dependent functions."""
        self.tokens: list[tuple[str, str]] = []
        while text.strip():
            found = TOKEN.match(text)
            if not found or found.lastgroup is None:
                raise ValueError(f"cannot read {text!r}")
            self.tokens.append((found.lastgroup, found[found.lastgroup]))
            text = text[found.end() :]
        self.scope = scope

    def value(self) -> Json:
        """Return the value of the expression."""
        found = self.operand()
        if self.tokens:
            raise ValueError(f"not read: {self.tokens}")
        return found()

    def operand(self) -> Callable[[], Json]:
        """Parse one operand with its suffixes. The result is evaluated later, so that `if` evaluates one branch."""
        kind, text = self.tokens.pop(0)
        found: Callable[[], Json]
        if kind == "text":
            found = lambda: text[1:-1].replace("''", "'")  # noqa: E731
        elif kind == "number":
            found = lambda: int(text)  # noqa: E731
        elif kind == "name":
            found = self.call(text)
        else:
            raise ValueError(f"{text!r} begins no operand")
        while self.tokens and self.tokens[0][1] in (".", "["):
            _, mark = self.tokens.pop(0)
            found = self.member(found) if mark == "." else self.item(found)
        return found

    def member(self, of: Callable[[], Json]) -> Callable[[], Json]:
        _, key = self.tokens.pop(0)
        return lambda: of()[key]

    def item(self, of: Callable[[], Json]) -> Callable[[], Json]:
        index = self.operand()
        self.tokens.pop(0)
        return lambda: of()[index()]

    def call(self, name: str) -> Callable[[], Json]:
        if self.tokens.pop(0)[1] != "(":
            raise ValueError(f"{name} is no function")
        arguments: list[Callable[[], Json]] = []
        while self.tokens[0][1] != ")":
            arguments.append(self.operand())
            if self.tokens[0][1] == ",":
                self.tokens.pop(0)
        self.tokens.pop(0)
        return lambda: self.apply(name, arguments)

    def apply(self, name: str, arguments: list[Callable[[], Json]]) -> Json:
        if name == "if":
            condition, yes, no = arguments
            return yes() if condition() else no()
        if name == "lambda":
            variable, body = arguments
            return lambda each: self.bound(variable(), each, body)
        if name == "lambdaVariables":
            return self.variables[arguments[0]()]
        function = {**FUNCTIONS, **self.scope}.get(name)
        if function is None:
            raise ValueError(f"there is no function {name} here")
        return function(*(argument() for argument in arguments))

    variables: dict[str, Json] = {}  # noqa: RUF012  # each expression makes its own in `bound`

    def bound(self, variable: str, each: Json, body: Callable[[], Json]) -> Json:
        self.variables = {**self.variables, variable: each}
        return body()


def concat(*parts: Json) -> Json:
    if isinstance(parts[0], list):
        return [one for part in parts for one in part]
    return "".join(parts)


FUNCTIONS: dict[str, Callable[..., Json]] = {
    "concat": concat,
    "contains": lambda whole, part: part in whole,
    "createArray": lambda *items: list(items),
    "createObject": lambda *pairs: dict(zip(pairs[::2], pairs[1::2], strict=True)),
    "filter": lambda items, test: [item for item in items if test(item)],
    "join": lambda items, between: between.join(items),
    "not": lambda value: not value,
    "split": lambda text, at: text.split(at),
    "startsWith": lambda text, start: text.lower().startswith(start.lower()),
    "take": lambda items, count: items[:count],
    "toLower": str.lower,
    "uniqueString": lambda *texts: f"{abs(hash(texts)):013x}"[:13],
}


def evaluate(value: Json, scope: Scope) -> Json:
    """Return *value* with all expressions evaluated and escaped brackets unescaped."""
    if isinstance(value, dict):
        return {key: evaluate(inner, scope) for key, inner in value.items()}
    if isinstance(value, list):
        return [evaluate(inner, scope) for inner in value]
    if isinstance(value, str) and value.startswith("[["):
        return value[1:]
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        return Expression(value[1:-1], scope).value()
    return value


class Policy:
    """A definition with the values of its parameters."""

    def __init__(self, rule: Json, declared: Json, values: Mapping[str, Json]) -> None:
        """Create the policy of *rule* with its *declared* parameters. A missing parameter raises KeyError."""
        self.rule = rule
        self.values = {
            name: values[name] if name in values else spec["defaultValue"] for name, spec in declared.items()
        }

    def scope(self, resource: Json) -> Scope:
        """Return the functions that read *resource*."""
        return {
            "parameters": self.values.__getitem__,
            "field": lambda name: field(resource, name),
            "resourceGroup": lambda: {"name": resource["id"].split("/")[4]},
        }

    def applies(self, resource: Json) -> bool:
        """Return whether the policy applies to *resource*."""
        return self.holds(self.rule["if"], resource)

    def complies(self, resource: Json) -> bool:
        """Return whether *resource* complies with the policy."""
        return not self.applies(resource) or self.holds(self.rule["then"]["details"]["existenceCondition"], resource)

    def holds(self, condition: Json, resource: Json, item: Json = None) -> bool:
        """Return whether *condition* is true. *item* is the current list element of `count`."""
        if "allOf" in condition:
            return all(self.holds(one, resource, item) for one in condition["allOf"])
        if "anyOf" in condition:
            return any(self.holds(one, resource, item) for one in condition["anyOf"])
        scope = self.scope(resource)
        (operator,) = condition.keys() - {"field", "value", "count"}
        wanted = evaluate(condition[operator], scope)
        if "count" in condition:
            path, where = condition["count"]["field"], condition["count"]["where"]
            items = field(resource, path.removesuffix("[*]")) or []
            return compare(operator, sum(self.holds(where, resource, one) for one in items), wanted)
        if "field" in condition:
            name = evaluate(condition["field"], scope)
            found = item.get(name.partition("[*].")[2]) if "[*]." in name else field(resource, name)
        else:
            found = evaluate(condition["value"], scope)
        return compare(operator, found, wanted)

    def remediate(self, resource: Json) -> Json:
        """Return *resource* after the deployment, or unchanged if no deployment is necessary."""
        if self.values["effect"] != "DeployIfNotExists" or self.complies(resource):
            return resource
        deployment = self.rule["then"]["details"]["deployment"]["properties"]
        given = {name: evaluate(each["value"], self.scope(resource)) for name, each in deployment["parameters"].items()}
        for made in deploy(deployment["template"], given, resource):
            resource = put(made, resource)
        return resource


def field(resource: Json, name: str) -> Json:
    """Return a field or an alias of *resource*, or None."""
    if name in {"id", "name", "type", "location"}:
        return resource[name]
    tag = re.fullmatch(r"tags\['?([^']+?)'?\]", name)
    if tag:
        return resource.get("tags", {}).get(tag[1])
    if not name.startswith("Microsoft."):
        raise ValueError(f"{name} is no field")
    if not name.startswith(f"{resource['type']}/"):
        return None  # an alias of another type
    found = resource["properties"]
    for key in name.removeprefix(f"{resource['type']}/").split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return found


def compare(operator: str, found: Json, wanted: Json) -> bool:
    """Return the result of one operator. String comparisons ignore case."""

    def plain(value: Json) -> Json:
        if isinstance(value, list):
            return [plain(one) for one in value]
        return value.lower() if isinstance(value, str) else value

    found, wanted = plain(found), plain(wanted)
    if operator == "equals":
        return bool(found == wanted)
    if operator == "exists":
        return (found is not None) is wanted
    if operator == "in":
        return bool(found in wanted)
    if operator == "notIn":
        return bool(found not in wanted)
    if operator == "greater":
        return bool(found > wanted)
    raise ValueError(f"there is no operator {operator} here")


def deploy(template: Json, given: Mapping[str, Json], resource: Json) -> list[Json]:
    """Return the resources of *template*, with those of nested templates in place."""
    if given.keys() != template["parameters"].keys():
        raise ValueError(f"{sorted(given)} are given, {sorted(template['parameters'])} are asked for")
    variables = template.get("variables", {})
    scope: dict[str, Callable[..., Json]] = {
        "parameters": given.__getitem__,
        "variables": lambda name: evaluate(variables[name], scope),
    }
    made = []
    for each in template["resources"]:
        if each["type"] != "Microsoft.Resources/deployments":
            made.append(evaluate(each, scope))
            continue
        # Only an outer template can reference an existing resource, because the inner one creates it.
        asking = {**scope, "reference": lambda name, _: {resource["id"]: resource["properties"]}[name]}
        evaluate(each["name"], asking)
        inner = each["properties"]
        if inner["expressionEvaluationOptions"] != {"scope": "inner"}:
            raise ValueError("only inner scopes are known here")
        passed = {name: evaluate(value["value"], asking) for name, value in inner["parameters"].items()}
        made += deploy(inner["template"], passed, resource)
    return made


def put(made: Json, resource: Json) -> Json:
    """Return *resource* after the deployment of *made*."""
    changed = copy.deepcopy(resource)
    if made["location"] != resource["location"]:
        raise ValueError("a resource cannot move")
    if made["type"] == f"{resource['type']}/VMapplications":
        name, _, application = made["name"].partition("/")
        profile = changed["properties"].setdefault("applicationProfile", {})
        kept = [
            one
            for one in profile.get("galleryApplications", [])
            if one["packageReferenceId"].split("/")[-3].lower() != application.lower()
        ]
        profile["galleryApplications"] = [*kept, made["properties"]]
    elif made["type"] == resource["type"]:
        name = made["name"]
        merge(changed["properties"], made["properties"])
    else:
        raise ValueError(f"{made['type']} is none of {resource['type']}")
    if name != resource["name"]:
        raise ValueError(f"{name} is another resource")
    return changed


def merge(old: dict[str, Json], new: Mapping[str, Json]) -> None:
    """Merge *new* into *old*: objects are merged, and lists are replaced."""
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(old.get(key), dict):
            merge(old[key], value)
        else:
            old[key] = value
