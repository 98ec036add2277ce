import pytest

from bridge import strict_json


def test_valid_json_is_parsed():
    assert strict_json.loads('{"a": [1, 2.5, null, "x"], "b": {}}') == {"a": [1, 2.5, None, "x"], "b": {}}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("NaN", "NaN is not JSON"),
        ("[-Infinity]", "-Infinity is not JSON"),
        ("1e999", "a number is out of range"),
        ("1" * 4_301, "an integer has more than 4300 digits"),
        ('{"a": 1, "a": 2}', "a member occurs twice"),
        ("[" * 100_000, "it is nested too deeply"),
    ],
)
def test_ambiguous_json_is_rejected_without_quoting_it(text, reason):
    with pytest.raises(strict_json.JsonRefused) as refused:
        strict_json.loads(text)
    assert str(refused.value) == reason


def test_caller_sets_the_limits():
    assert strict_json.loads('{"a": 1, "a": 2}', allows_duplicates=True) == {"a": 2}
    with pytest.raises(strict_json.JsonRefused):
        strict_json.loads("123", most_digits=2)


def test_invalid_json_is_a_value_error():
    with pytest.raises(ValueError, match="Expecting"):
        strict_json.loads("{")
