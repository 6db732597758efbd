"""Strings that cannot be encoded, and invalid JSON: what is refused, replaced, and written anyway."""

from __future__ import annotations

import json

import pytest

from megarl.machine.strict_json import (
    dump_readable,
    is_encodable,
    load_strictly,
    lone_surrogate,
    replace_surrogates,
)

HALF = "\ud83d"


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (HALF, ""),
        ({"a": [{"b": "x"}, {"b": HALF}]}, "a[1].b"),
        ([("x", f"y{HALF}z")], "[0][1]"),
        ({"a": {HALF: 1}}, "the key '\\ud83d' of a"),
        ({"a": "\U0001f600", "b": ["\u00e9", None, 1.5, True]}, None),
    ],
)
def test_where_a_lone_surrogate_is(value, place):
    assert lone_surrogate(value) == place


def test_replaced_text_can_be_encoded_and_other_text_is_unchanged():
    value = {"content": [f"a{HALF}b", "\ud83d\ude00", "é\x00"], HALF: (1, None)}
    replaced = replace_surrogates(value)
    assert replaced == {"content": ["a\ufffdb", "\U0001f600", "é\x00"], "\ufffd": [1, None]}
    assert is_encodable(str(replaced))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": NaN}', "NaN is not a JSON number"),
        ('{"a": -Infinity}', "-Infinity is not a JSON number"),
        ('{"a": {"b": 1, "c": 2, "b": 3}}', "the key 'b' occurs twice"),
        ('{"a": ["\\ud83d"]}', r"a\[0\] has half of a character"),
    ],
)
def test_what_is_no_json(text, said):
    with pytest.raises(ValueError, match=said):
        load_strictly(text)


def test_any_text_is_written_and_read_again():
    value = {"text": f"é{HALF}", "other": {1, 2}}
    text = dump_readable(value, default=sorted)
    assert "é" in text.encode().decode()
    assert json.loads(text) == {"text": f"é{HALF}", "other": [1, 2]}


@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_deep_json_is_refused_whatever_the_limit_of_python(begin, end):
    for levels in (202, 5_000, 100_000):
        count = levels // len(end)
        with pytest.raises(ValueError, match="nested more than 200 levels"):
            load_strictly(f"{begin * count}1{end * count}")
    count = 200 // len(end)
    assert json.dumps(load_strictly(f"{begin * count}1{end * count}")).count("1") == 1
