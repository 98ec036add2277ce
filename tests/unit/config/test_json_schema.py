"""The JSON schema of the configuration accepts valid configurations and rejects typical errors."""

import sys

import jsonschema
import pytest

from bridge.cli.init import configuration, recipe_names
from bridge.config.json_schema import configuration_schema

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VALIDATOR = jsonschema.Draft202012Validator(configuration_schema())


def paths_of(table):
    """Return the paths at which the schema rejects *table*."""
    return {".".join(map(str, error.path)) for error in VALIDATOR.iter_errors(table)}


@pytest.mark.parametrize("name", recipe_names())
def test_schema_accepts_every_recipe(name):
    assert paths_of(tomllib.loads(configuration([name]))) == set()


def test_schema_accepts_a_custom_sink():
    assert paths_of({"sinks": [{"type": "acme.sinks:PagerSink", "pages": 3}]}) == set()


@pytest.mark.parametrize(
    ("table", "path"),
    [
        ({"imsd": {}}, ""),
        ({"imds": {"timeout": 3}}, "imds"),
        ({"imds": {"timeout_seconds": "3"}}, "imds.timeout_seconds"),
        ({"imds": {"poll_interval_seconds": 0.1}}, "imds.poll_interval_seconds"),
        ({"sinks": [{"url": "http://x"}]}, "sinks.0"),
        ({"sinks": [{"type": "webhook", "ulr": "http://x"}]}, "sinks.0"),
        ({"sinks": [{"type": "webhook", "format": "xml"}]}, "sinks.0.format"),
        ({"sinks": [{"type": "stdout", "max_batch": 0}]}, "sinks.0.max_batch"),
        ({"sinks": [{"type": "stdout", "transitions": []}]}, "sinks.0.transitions"),
        ({"approval": {"rules": [{"name": "x", "action": "aprove"}]}}, "approval"),
    ],
)
def test_schema_rejects_tables_that_the_agent_rejects(table, path):
    assert path in paths_of(table)
