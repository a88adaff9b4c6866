"""What grammars are taken, and that a text which is over obeys its grammar in full."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
from llguidance import LLMatcher, LLTokenizer

from quadriga.sampling.params import Grammar
from quadriga.server.grammars.grammar import compile_grammar, to_library_form
from tests.unit.tiny_vocabulary import tiny_vocabulary
from tokenizer_proc.intake.grammar_sandbox import _check_grammar

VOCAB_SIZE = 512
SEEDS = 12


@pytest.fixture(scope="module")
def vocabulary(llama_dir: Path) -> LLTokenizer:
    return tiny_vocabulary(llama_dir, VOCAB_SIZE)


def walk(matcher: LLMatcher, chance: random.Random, most: int = 60) -> tuple[list[int], str]:
    """Choose among the allowed tokens until the text may end, and does: its ids, and its end."""
    ids: list[int] = []
    while len(ids) < most:
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[:VOCAB_SIZE].nonzero()[0].tolist()
        going_on = [token for token in allowed if token != 0]
        assert not matcher.is_error()
        if matcher.is_accepting() and (not going_on or chance.random() < 0.4):
            return ids, "stop"
        assert going_on, "the text may neither go on nor end"
        ids.append(chance.choice(going_on))
        assert matcher.consume_token(ids[-1])
    return ids, "length"


SAME_IN_PYTHON = [
    r"^abc$", r"^(a|b)$", r"a{2,}?b", "", "()", "a||b", r"x*", r"(ab){3}|cd", "(a*)*b",
    "(foo|foobar)(bar)?", "(?i)k", "(?i)straße", "(?i)[k-l]{2}", "a(?i:b)c", "(?s).{2}", ".{2}",
    "(?s:.)a.", "(?P<n>a)(?P<m>b)", "(?x) a b # comment\n c", "(?x) a b # co/mm\\ent\n c",
    "(?x) a\n b", "(?x)[a b]\n\nc", "(?x: a # q\n b) c", "(?ix) A # x\n b", "(?x)a\\ b",
    "(?x) a # last", "(?x)a\\#b", "(?x) a \\# # b\n c", "(?x)a(?-x: # b\nc)", "(?x) a # x\r b",
    "(?x)/+ # /\n \\/ \\\\ /", "a\nb", "a # b\nc", "a\rb", "\u2028a", r"\w\W\d\D\s\S",
    r"\p{L}\P{L}", r"\p{Greek}+x", r"\x41\u0042", r"\a\f\t\n\r\v", r"[\d\-a\]]{3}", r"[^\n]",
    r"[^a]", r"[\]\-^]{3}", r"\.\*\+\?\(\)\|\[\]\{\}\^\$", r"/+\/\\/", "é|è", "[à-ü]{2}", "😀?👋🏽",
    r"[^\x00-\x7f]{2,4}", r"a\.b\\c\"",
]  # fmt: skip
"""Patterns that mean the same in Rust's crate and in Python's."""
OTHERWISE_IN_PYTHON = {
    r"\Aab\z": "ab",
    "(?U)a+b": "a+b",
    "(?R)a$": "a",
    r"\U00000043\x{44}": "CD",
    "[a-z&&[^aeiou]]{4}": "[bcdfghjklmnpqrstvwxyz]{4}",
    r"(?<n>a)b": "ab",
}


@pytest.mark.parametrize("pattern", [*SAME_IN_PYTHON, *OTHERWISE_IN_PYTHON])
def test_a_text_that_is_over_matches_its_regex_in_full(
    vocabulary: LLTokenizer, pattern: str
) -> None:
    judge = regex.compile(OTHERWISE_IN_PYTHON.get(pattern, pattern))
    form, over = to_library_form(Grammar("regex", pattern), vocabulary), 0
    for seed in range(SEEDS):
        ids, end = walk(compile_grammar(vocabulary, form), random.Random(seed))
        text = vocabulary.decode_bytes(ids)
        over += end == "stop"
        assert end == "length" or judge.fullmatch(text.decode()), (pattern, text)
    assert over


@pytest.mark.parametrize(
    "pattern",
    ["a$b", "a^b", "(?m)^a$", r"\bfoo\b", "(?=a)b", r"(a)\1", "a{2,1}", "(", "(?#note)a", r"a\Z",
     "(?x)a # x\\\nb", "(?x) [ # \n ] (", "(?-u:\\xff)", "/(", "\\", "a\\", "a\\\nb"],
)  # fmt: skip
def test_a_regex_that_cannot_be_obeyed_is_refused_with_the_reason(
    vocabulary: LLTokenizer, pattern: str
) -> None:
    form, error = json.loads(_check_grammar(vocabulary, Grammar("regex", pattern)))
    assert form == ""
    assert error


NOTHING_OBEYS: list[Any] = [
    {"$ref": "#"},
    {"anyOf": [{"$ref": "#"}]},
    {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"$id": "http://a", "$ref": "http://a#"},
    {"$anchor": "a", "$ref": "#a"},
    {"not": {}},
    {"enum": []},
    {"type": []},
    {"anyOf": []},
    {"oneOf": []},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"type": "string", "minLength": 5, "maxLength": 2},
    {"type": "array", "minItems": 3, "maxItems": 1},
    {"type": "array", "prefixItems": [False], "minItems": 1},
    {"type": "integer", "minimum": 5, "maximum": 2},
    {"type": "object", "properties": {"a": False}, "required": ["a"]},
    {"type": "string", "pattern": "[^\\s\\S]"},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"$ref": "#/nope"},
    {"$ref": "http://example.invalid/schema"},
    {"$dynamicRef": "#"},
    {"if": {}, "then": False},
    {"type": "foo"},
    {"type": 5},
    {"properties": 5},
    {"type": "string", "format": "nope"},
    {"type": "string", "pattern": "("},
    {"type": "string", "pattern": "a(?=b)"},
    {"type": "string", "maxLength": 10**30},
    {"type": "number", "multipleOf": 0},
    {"enum": ["\ud800"]},
    *("false", "true", "5", "[]", "null", '"x"', "", "{", '{"minLength": 1e400}', "[" * 100_000),
    '{"a":' * 5000 + "1" + "}" * 5000,
    '{"not":' * 100 + "{}" + "}" * 100,
]
OBEYED: list[Any] = [
    {},
    {"minLength": 5, "maxLength": 2},
    {"const": None},
    {"allOf": []},
    {"enum": [[1], {"a": 2}]},
    {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    {"type": "object", "properties": {"a": {"$ref": "#"}}},
    {"type": "array", "items": {"$ref": "#"}},
    {"type": "string", "minLength": 10**9},
    {"type": "array", "minItems": 10**9},
    {"type": "string", "pattern": "(a{1000}){1000}"},
    {"type": "integer", "minimum": 10**15},
    {"x-guidance": {"whitespace_pattern": "("}},
]
"""As far as a text can be begun: some are too long for any context."""


def as_text(schema: Any) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)


@pytest.mark.parametrize("schema", NOTHING_OBEYS, ids=lambda schema: as_text(schema)[:40])
def test_a_schema_that_nothing_obeys_is_refused_with_the_reason(
    vocabulary: LLTokenizer, schema: Any
) -> None:
    form, error = json.loads(_check_grammar(vocabulary, Grammar("json_schema", as_text(schema))))
    assert form == ""
    assert error


@pytest.mark.parametrize("schema", OBEYED, ids=lambda schema: as_text(schema)[:40])
def test_a_schema_that_some_text_obeys_is_taken(vocabulary: LLTokenizer, schema: Any) -> None:
    form, error = json.loads(_check_grammar(vocabulary, Grammar("json_schema", as_text(schema))))
    assert error == ""
    walk(compile_grammar(vocabulary, form), random.Random(0), most=20)
