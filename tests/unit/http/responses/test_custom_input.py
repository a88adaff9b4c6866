"""The input of a custom tool is the same however its arguments are cut."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from http_proc.apis.responses.output import CustomInputReader


def read(pieces: list[str]) -> str:
    reader = CustomInputReader()
    return "".join([*(reader.push(piece) for piece in pieces), reader.finish()])


@settings(deadline=None)
@given(st.text(), st.booleans(), st.data())
def test_the_text_is_decoded_for_every_cut(text: str, is_ascii: bool, data: st.DataObject) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(arguments)), max_size=8)))
    pieces = [arguments[a:b] for a, b in zip([0, *cuts], [*cuts, len(arguments)], strict=True)]
    expected = "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)
    assert read(pieces) == read(list(arguments)) == expected


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (' { "input" : "a\\"b" } ', 'a"b'),
        ('{"input": "a', "a"),
        ('{"input": "a\\u00', "a"),
        ('{"input": "\\ud83d\\ude00"}', "\U0001f600"),
        ('{"input": "\\ud83dx"}', "\ufffdx"),
        ('{"input": "\\ude00"}', "\ufffd"),
        ('{"input": "\\q"}', "\\q"),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ('{"input": 5}', '{"input": 5}'),
        ('{"inp', '{"inp'),
        ("plain", "plain"),
        ("", ""),
    ],
)
def test_other_forms_are_the_input_as_they_are(arguments: str, text: str) -> None:
    assert read([arguments]) == read(list(arguments)) == text
