"""Incomplete connection strings, and signatures compared with the SDK."""

import importlib

import pytest

from bridge.sink import DeliveryFailed
from sinks.eventhubs.connection_string import parse, shared_access_signature

KEY = "c2VjcmV0LWtleQ=="


def test_invalid_connection_string_reports_the_missing_part_without_values():
    for text, said in [
        (f"SharedAccessKey={KEY}", "no Endpoint"),
        (f"Endpoint=sb://ns/;SharedAccessKey={KEY}", "does not have both SharedAccessKeyName and SharedAccessKey"),
        (f"Endpoint=sb://ns/;SharedAccessKeyName=a;SharedAccessKey={KEY}", "no EntityPath"),
    ]:
        with pytest.raises(DeliveryFailed, match=said) as caught:
            parse(text, eventhub=None)
        assert caught.value.needs_attention
        assert KEY not in str(caught.value)
        assert KEY not in repr(parse(f"Endpoint=sb://n;SharedAccessKeyName=a;SharedAccessKey={KEY}", eventhub="h"))


def test_signature_is_the_same_as_from_the_sdk():
    generate_sas_token = importlib.import_module("azure.eventhub._pyamqp.utils").generate_sas_token
    ours = shared_access_signature("https://ns/hub", key_name="a b", key=KEY, expires_on=1_800_000_000)
    theirs = generate_sas_token("https://ns/hub", "a b", KEY, 1_800_000_000)
    assert set(ours.split(" ")[1].split("&")) >= {each for each in theirs.split(" ")[1].split("&") if "skn" not in each}
