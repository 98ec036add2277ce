"""Parsing of metadata service responses."""

import json
from datetime import datetime, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.errors import DocumentInvalid
from bridge.events.event import compact_json, decode_document, encode
from bridge.imds.document import MAX_DOCUMENT_BYTES, parse_document, parse_identity, parse_not_before

FULL = {
    "EventId": "5E1C2A34-0000-4000-8000-000000000001",
    "EventType": "Freeze",
    "ResourceType": "VirtualMachine",
    "Resources": ["web_0", "web_1"],
    "EventStatus": "Scheduled",
    "NotBefore": "Fri, 20 Nov 2026 11:15:00 GMT",
    "Description": "Host maintenance",
    "EventSource": "Platform",
    "DurationInSeconds": 5,
}
ELEVEN_FIFTEEN = datetime(2026, 11, 20, 11, 15, tzinfo=timezone.utc)


def document(*events, **top):
    return json.dumps({"DocumentIncarnation": 1, "Events": list(events), **top}).encode()


def event(**fields):
    return parse_document(document({"EventStatus": "Scheduled", **fields})).events[0]


def test_every_field_of_the_newest_version_is_parsed():
    (read,) = parse_document(document(FULL)).events
    assert read.event_id == FULL["EventId"]
    assert (read.event_type, read.event_status, read.resource_type) == ("Freeze", "Scheduled", "VirtualMachine")
    assert read.resources == ("web_0", "web_1")
    assert (read.not_before, read.not_before_raw) == (ELEVEN_FIFTEEN, FULL["NotBefore"])
    assert (read.description, read.event_source, read.duration_seconds) == ("Host maintenance", "Platform", 5)
    assert read.extra == {}


def test_fields_that_an_old_version_lacks_are_null():
    read = event()
    assert read.event_id is read.resources is read.not_before is read.not_before_raw is read.duration_seconds is None
    assert read.extra == {}
    assert event(**dict.fromkeys([name for name in FULL if name != "EventStatus"])) == read
    assert event(DurationInSeconds=-1) == read


def test_unknown_fields_are_kept():
    assert event(Impact={"Level": [1, 2.5, None]}).extra == {"Impact": {"Level": [1, 2.5, None]}}


@pytest.mark.parametrize(
    ("name", "field", "attribute"),
    [
        ("EventId", "", "event_id"),
        ("EventType", ["Freeze"], "event_type"),
        ("Resources", "web_0", "resources"),
        ("Resources", ["web_0", 1], "resources"),
        ("NotBefore", 1700000000, "not_before_raw"),
        ("Description", {}, "description"),
        ("DurationInSeconds", "5", "duration_seconds"),
        ("DurationInSeconds", 5.0, "duration_seconds"),
        ("DurationInSeconds", -2, "duration_seconds"),
    ],
)
def test_known_field_of_the_wrong_type_is_null_and_kept_unchanged(name, field, attribute):
    read = event(**{name: field})
    assert getattr(read, attribute) is None
    assert read.extra == {name: field}
    assert type(read.extra[name]) is type(field)


@pytest.mark.parametrize(("name", "names"), [(["_web_0"], ("_web_0",)), ("web_0", ("web_0",)), ([], ())])
def test_resource_name_of_2017_replaces_resources(name, names):
    assert event(ResourceName=name).resources == names
    assert event(ResourceName=name, Resources=None).resources == names


@pytest.mark.parametrize(
    ("incarnation", "read"),
    [(2, 2), ("abc123", "abc123"), (0, 0), (None, None), (True, None), (1.5, None), ([1], None), (2**63, str(2**63))],
)
def test_incarnation_keeps_its_type_number_or_text(incarnation, read):
    assert parse_document(document(DocumentIncarnation=incarnation)).incarnation == read


@pytest.mark.parametrize(
    ("number", "read"),
    [("5.0", 5), ("5e0", 5), ("-0.0", 0), ("-3.0", -3), ("9223372036854775808.0", str(2**63)), ("5.5", None)],
)
def test_integral_float_incarnation_is_an_integer(number, read):
    answer = parse_document(f'{{"DocumentIncarnation": {number}, "Events": []}}'.encode())
    assert (answer.incarnation, type(answer.incarnation)) == (read, type(read))
    assert decode_document(encode(answer)) == answer


def test_a_byte_order_mark_is_tolerated():
    assert parse_document(b"\xef\xbb\xbf" + document(FULL)) == parse_document(document(FULL))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" \r\n",
        b"null",
        b"[]",
        b"{",
        b'{"DocumentIncarnation": 1}',
        b'{"Events": null}',
        b'{"Events": [null]}',
        b'{"Events": [{"EventStatus": null}]}',
        b'{"Events": [{"EventStatus": 1}]}',
        b'{"Events": [], "X": NaN}',
        b'{"Events": [], "X": 1e999}',
        b'{"Events": [], "X": ' + b"9" * 5000 + b"}",
        b'{"Events": [], "X": ' + b"[" * 65 + b"]" * 65 + b"}",
        b'{"Events": [], "X": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"Events": []} trailing',
        b'{"Events": [], "X": "\xff"}',
        '{"Events": []}'.encode("utf-16"),
        b'{"Events": []}' + b" " * MAX_DOCUMENT_BYTES,
    ],
    ids=lambda body: repr(body[:30]),
)
def test_invalid_document_is_rejected(body):
    with pytest.raises(DocumentInvalid) as caught:
        parse_document(body)
    assert len(str(caught.value)) < 500


def test_integers_beyond_64_bits_become_text():
    assert event(X=2**63 - 1, Y=-(2**63), Z=[2**63]).extra == {"X": 2**63 - 1, "Y": -(2**63), "Z": [str(2**63)]}


def test_lone_surrogates_are_replaced_and_pairs_are_kept():
    body = rb'{"Events": [{"EventStatus": "Started", "Description": "a\ud800b \ud83d\ude00", "k\udfff": ["\udc00"]}]}'
    read = parse_document(body)
    assert read.events[0].description == "a\ufffdb \U0001f600"
    assert read.events[0].extra == {"k\ufffd": ["\ufffd"]}
    assert decode_document(encode(read)) == read


@pytest.mark.parametrize(
    "text",
    [
        "Fri, 20 Nov 2026 11:15:00 GMT",
        "Mon, 20 Nov 2026 11:15:00 GMT",
        "20 Nov 2026 11:15:00 GMT",
        "Fri, 20 Nov 2026 12:15:00 +0100",
        "Fri, 20 Nov 2026 05:45:00 -0530",
        "2026-11-20T11:15:00Z",
        "2026-11-20T11:15:00",
        "2026-11-20T13:15:00+02:00",
        "2026-11-20T11:15:00.0000000Z",
        "2026-11-20T11:15:00.000000+00:00",
    ],
)
def test_not_before_is_parsed_in_every_known_format(text):
    assert parse_not_before(text) == ELEVEN_FIFTEEN
    assert parse_not_before(text).tzinfo is timezone.utc


@pytest.mark.parametrize(
    "text",
    [
        "",
        "soon",
        "Fri, 20 Nov 2026 11:15:00 CET",
        "Fri, 20 Foo 2026 11:15:00 GMT",
        "Fri, 32 Nov 2026 11:15:00 GMT",
        "2026-02-30T00:00:00Z",
        "2026-11-20",
        "0001-01-01T00:00:00",
        "Mon, 01 Jan 0001 00:00:00 GMT",
        "Fri, 20 Nov 99999999999999999999 11:15:00 GMT",
        "9999-12-31T23:59:59-01:00",
        "1700000000",
        "\u0662\u0660\u0662\u0666-11-20T11:15:00Z",
    ],
)
def test_invalid_date_is_unknown_and_kept_as_text(text):
    read = event(NotBefore=text)
    assert read.not_before is None
    assert read.not_before_raw == text


COMPUTE = {
    "name": "web_0",
    "vmId": "5E1C2A34-0000-4000-8000-00000000000a",
    "resourceId": "/subscriptions/s/resourceGroups/rg/providers/Microsoft.Compute/virtualMachines/web_0",
    "subscriptionId": "s",
    "resourceGroupName": "rg",
    "location": "westeurope",
    "vmScaleSetName": "web",
    "zone": "",
    "placementGroupId": "",
    "platformFaultDomain": "2",
    "platformUpdateDomain": "",
    "vmSize": "Standard_D2s_v5",
    "tagsList": [{"name": "a", "value": "1;2"}, {"name": "b"}, 3, {"name": "c", "value": ""}],
}


def test_instance_document_identifies_the_vm():
    identity = parse_identity(json.dumps(COMPUTE).encode())
    assert (identity.name, identity.vm_id) == ("web_0", COMPUTE["vmId"])
    assert (identity.resource_id, identity.subscription_id) == (COMPUTE["resourceId"], "s")
    assert (identity.resource_group, identity.location, identity.scale_set) == ("rg", "westeurope", "web")
    assert (identity.zone, identity.placement_group_id) == (None, None)
    assert (identity.size, identity.fault_domain, identity.update_domain) == ("Standard_D2s_v5", "2", None)
    assert identity.tags == {"a": "1;2", "c": ""}


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"name": "", "vmId": null}', b'{"name": 5}', b"<html>"])
def test_instance_document_without_an_identity_is_rejected(body):
    with pytest.raises(DocumentInvalid):
        parse_identity(body)


# Small examples are fast to generate, and three events of five fields find the same parser errors.
text = st.text(max_size=8)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | text
values = (
    scalars | st.lists(scalars, max_size=3) | st.dictionaries(text, scalars | st.lists(scalars, max_size=2), max_size=3)
)
fields = st.dictionaries(st.sampled_from([*FULL, "ResourceName"]) | text, values, max_size=5)
documents = st.fixed_dictionaries(
    {}, optional={"DocumentIncarnation": values, "Events": st.lists(fields | values, max_size=3) | values, "X": values}
)


def assert_document_or_refusal(body):
    try:
        read = parse_document(body)
    except DocumentInvalid:
        return
    assert decode_document(encode(read)) == read
    compact_json([each.extra for each in read.events])


@settings(max_examples=200)
@given(value=documents | values)
def test_any_json_is_parsed_or_rejected(value):
    assert_document_or_refusal(json.dumps(value).encode())


@given(body=st.binary() | st.text().map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_parsed_or_rejected(body):
    assert_document_or_refusal(body)
