"""JSON schemas are obeyed to the letter, refused by the path of a keyword, or relaxed in place."""

import json
import random
import re
from typing import Any

import pytest
from llguidance import LLMatcher

from quadriga.sampling.params import Grammar
from quadriga.server.grammars.exact_integers import integers_between
from quadriga.server.grammars.grammar import (
    LibrarySchemas,
    byte_vocabulary,
    compile_grammar,
    to_library_form,
)
from quadriga.server.grammars.json_schema import OPTIONS, prepared_schema

BIG, EVEN_BIGGER = 1234567890123456789, 2**70 + 1
LENIENT = {OPTIONS: {"lenient": True}}


def matcher_of(schema: Any) -> LLMatcher:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    form = to_library_form(Grammar("json_schema", text), byte_vocabulary())
    return compile_grammar(byte_vocabulary(), form)


def obeys(schema: Any, text: str) -> bool:
    matcher = matcher_of(schema)
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and (
        matcher.is_accepting()
    )


def an_object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


@pytest.mark.parametrize("number", [BIG, -BIG, EVEN_BIGGER, 2**63, 2**53 + 1])
@pytest.mark.parametrize(
    "schema",
    [
        lambda n: {"enum": [n]},
        lambda n: {"const": n},
        lambda n: {"type": ["string", "integer"], "enum": ["a", n]},
        lambda n: {"type": "integer", "minimum": n, "maximum": n},
        lambda n: {"type": "integer", "exclusiveMinimum": n - 1, "exclusiveMaximum": n + 1},
        lambda n: {"type": ["integer", "null"], "minimum": n, "maximum": n},
        lambda n: {"anyOf": [{"const": n}, {"type": "null"}]},
        lambda n: {"$ref": "#/$defs/id", "$defs": {"id": {"const": n}}},
        lambda n: {"allOf": [{"const": n}]},
    ],
)
def test_large_integers_are_exact_wherever_they_stand(schema: Any, number: int) -> None:
    for around in (
        lambda part: (part, "{}"),
        lambda part: (an_object(a={"type": "string"}, id=part), '{{"a":"x", "id":{}}}'),
        lambda part: ({"type": "array", "items": part, "minItems": 1, "maxItems": 2}, "[{}]"),
    ):
        whole, text = around(schema(number))
        if "$defs" in json.dumps(whole):
            whole = {**whole, "$defs": {"id": {"const": number}}}
        assert obeys(whole, text.format(number))
        for wrong in (number + 1, number - 1, int(float(number)) + 2048, 5):
            assert not obeys(whole, text.format(wrong)), (whole, wrong)


def test_objects_around_large_integers_have_all_their_properties() -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"type": "null"}, "id": {"const": BIG}, "b": {"type": "null"}},
        "required": ["id"],
    }
    for text in (
        f'{{"id":{BIG}}}',
        f'{{"a": null, "id": {BIG}, "b": null}}',
        f'{{"id":{BIG}, "c": [1], "d": 2}}',
    ):
        assert obeys(schema, text), text
    for text in (
        "{}",
        '{"a":null}',
        f'{{"id":{BIG},"a":null}}',
        f'{{"id":{BIG},"id":5}}',
        f'{{"id":{BIG},}}',
    ):
        assert not obeys(schema, text), text
    closed = {**schema, "additionalProperties": False}
    assert not obeys(closed, f'{{"id":{BIG}, "c": 1}}')
    pair: Any = {"type": "array", "prefixItems": [{"const": BIG}, {"const": 1}], "items": False}
    for text in ("[]", f"[{BIG}]", f"[{BIG}, 1]"):
        assert obeys(pair, text)
    assert not obeys(pair, f"[{BIG},1,1]")
    assert not obeys({**pair, "minItems": 2}, f"[{BIG}]")
    open_end: Any = {"type": "array", "prefixItems": [{"const": BIG}], "items": {"type": "null"}}
    assert obeys(open_end, f"[{BIG},null,null]") and obeys(open_end, "[]")
    assert not obeys(open_end, f"[{BIG},{BIG}]")


def test_bounds_of_64_bits_are_obeyed() -> None:
    signed = {"type": "integer", "format": "int64", "minimum": -(2**63), "maximum": 2**63 - 1}
    unsigned = {"type": "integer", "minimum": 0, "maximum": 2**64 - 1}
    for number in (0, 5, -5, 2**63 - 1, -(2**63), 10**18):
        assert obeys(signed, str(number))
    assert not any(obeys(signed, str(number)) for number in (2**63, -(2**63) - 1, 10**19))
    assert obeys(unsigned, str(2**64 - 1)) and not obeys(unsigned, str(2**64))


def test_integers_between_two_bounds_are_those_of_the_pattern() -> None:
    draw = random.Random(0)
    for _ in range(500):
        low, high = sorted(draw.randint(-(10 ** draw.randint(0, 4)), 10**4) for _ in range(2))
        least, most = draw.choice([low, low, None]), draw.choice([high, high, None])
        pattern = re.compile(integers_between(least, most))
        for number in {low - 1, low, low + 1, high - 1, high, high + 1, 0, -1, 99, 100}:
            within = (least is None or number >= least) and (most is None or number <= most)
            assert bool(pattern.fullmatch(str(number))) == within, (least, most, number)


@pytest.mark.parametrize(
    ("schema", "obeying"),
    [
        ('{"const": -0.0}', "0"),
        ('{"const": 1.0}', "1"),
        ('{"type": "integer", "const": 1.0}', "1"),
        ('{"enum": [1E2, 0.5]}', "100"),
        ('{"type": "array", "minItems": 1.0, "items": {}}', "[5]"),
        ('{"type": "integer", "minimum": 1.5, "maximum": 2.0}', "2"),
        ('{"type": "integer", "default": 1e400}', "7"),
        (f'{{"type": "integer", "default": {EVEN_BIGGER}}}', "7"),
    ],
)
def test_other_spellings_of_numbers_mean_the_same(schema: str, obeying: str) -> None:
    assert obeys(schema, obeying)


def nested(levels: int, schema: Any) -> Any:
    for _ in range(levels):
        schema = an_object(a=schema)
    return schema


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        (an_object(p={"type": "string", "format": "path"}), 'properties.p.format is "path"'),
        (an_object(t={"type": "array", "uniqueItems": True}), "properties.t.uniqueItems is true"),
        (nested(2, {"not": {"type": "string"}}), "properties.a.properties.a.not"),
        ({"items": {"pattern": "(?!a)b"}}, 'items.pattern is "(?!a)b": look-around'),
        ({"anyOf": [{"type": "null"}, {"if": {}}]}, "anyOf[1].if"),
        ({"$defs": {"x": {"contains": {}}}, "$ref": "#/$defs/x"}, "$defs.x.contains"),
        (an_object(n={"type": "number", "maximum": 2**70 + 1}), "properties.n.maximum is 11805"),
        (an_object(n={"multipleOf": 2**53 + 1}), "properties.n.multipleOf is 9007199254740993"),
        ('{"properties": {"n": {"const": 1e400}}}', "properties.n.const"),
        ({"allOf": [{"const": BIG}, {"type": "integer"}]}, f"allOf[0].const is {BIG}: grammars"),
        (an_object(n={"type": "string", "const": BIG}), f"const is {BIG}: no value has the type"),
        (
            an_object(n={"type": "integer", "minimum": BIG, "maximum": BIG - 1}),
            f"properties.n.minimum is {BIG}: ",
        ),
        (an_object(n={"type": "integer", "maximum": 1e300}), "properties.n.maximum is 1e+300"),
        (an_object(n={"$ref": "#/$defs/none"}), 'properties.n.$ref is "#/$defs/none"'),
        (an_object(n={"$ref": "#"}), 'properties.n.$ref is "#": it leads to itself'),
        (an_object(n={"enum": []}), "properties.n.enum is []"),
        (an_object(n={"type": "array", "minItems": 3, "maxItems": 2}), "properties.n.minItems"),
        (an_object(n={"type": "integer", "minimum": 3, "maximum": 2}), "properties.n.minimum"),
        (an_object(n={"type": "string", "minLength": 3, "maxLength": 2}), "properties.n.minLength"),
        ({**an_object(a={}), "required": ["b"]}, "required is [\"b\"]: it names 'b'"),
        ({**an_object(a={}), "minProperties": 2}, "minProperties is 2: only 1"),
        (an_object(n={"allOf": [{"type": "null"}, {"type": "string"}]}), "properties.n.allOf"),
        (an_object(n={"type": "string", "enum": [1]}), "properties.n.enum is [1]"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_by_its_path(schema: Any, where: str) -> None:
    with pytest.raises(ValueError, match=re.escape(where)):
        matcher_of(schema)


def test_a_schema_is_called_by_its_name_in_errors() -> None:
    tool = {**an_object(p={"format": "path", "type": "string"}), OPTIONS: {"name": "tools[3] (f)"}}
    for schema in (tool, an_object(arguments=tool), {"anyOf": [{"type": "null"}, tool]}):
        with pytest.raises(ValueError, match=r"^tools\[3\] \(f\): properties\.p\.format is "):
            matcher_of(schema)


@pytest.mark.parametrize(
    ("schema", "relaxed"),
    [
        (an_object(p={"type": "string", "format": "path"}), an_object(p={"type": "string"})),
        (
            an_object(t={"type": "array", "items": {"type": "integer"}, "uniqueItems": True}),
            an_object(t={"type": "array", "items": {"type": "integer"}}),
        ),
        (an_object(n={"type": "string", "pattern": "(?=a)"}), an_object(n={"type": "string"})),
        (an_object(n={"not": {}, "type": "null"}), an_object(n={"type": "null"})),
        (an_object(n={"$ref": "https://a.example/b"}), an_object(n={})),
        (an_object(n={"$ref": "#"}), an_object(n={})),
        (
            an_object(n={"type": "array", "minItems": 3, "maxItems": 2}),
            an_object(n={"type": "array", "maxItems": 2}),
        ),
        (
            {**an_object(a={}, n=False), "required": ["a", "b", "n"]},
            {**an_object(a={}, n=False), "required": ["a"]},
        ),
        (
            {**an_object(a={}), "required": ["b"]},
            {key: value for key, value in an_object(a={}).items() if key != "required"},
        ),
        (an_object(n={"type": "string", "const": BIG}), an_object(n={"type": "string"})),
        (
            {"allOf": [{"const": BIG}, {"type": "integer"}], "type": "integer"},
            {"allOf": [{"type": "integer"}, {"type": "integer"}], "type": "integer"},
        ),
    ],
)
def test_a_lenient_schema_loses_only_what_cannot_be_obeyed(schema: Any, relaxed: Any) -> None:
    found = prepared_schema({**schema, **LENIENT}, LibrarySchemas())
    assert found == relaxed
    matcher_of({**schema, **LENIENT})
    with pytest.raises(ValueError, match=r"."):
        matcher_of(schema)


def test_definitions_of_a_named_schema_are_called_by_its_name() -> None:
    tool = {**an_object(p={"$ref": "#/$defs/p"}), "$defs": {"p": {"not": {}}}}
    named = {**tool, OPTIONS: {"name": "tools[0] (f)"}}
    for schema in (named, an_object(arguments=named)):
        with pytest.raises(ValueError, match=r"^tools\[0\] \(f\): \$defs\.p\.not is "):
            matcher_of(schema)


def test_a_lenient_schema_may_be_freed_but_for_its_type() -> None:
    schema = {"anyOf": [{**an_object(a={}), **LENIENT}, an_object(b={})]}
    found = prepared_schema(schema, LibrarySchemas(), frees_lenient=True)
    assert found == {"anyOf": [{"type": "object"}, an_object(b={})]}


def test_references_of_a_named_schema_are_relative_to_it() -> None:
    part = {**an_object(v={"$ref": "#/$defs/v"}), "$defs": {"v": {"type": "null"}}, OPTIONS: {}}
    other = {**an_object(v={"$ref": "#/$defs/v"}), "$defs": {"v": {"const": 5}}, **LENIENT}
    schema = {"anyOf": [{**part, OPTIONS: {"lenient": False}}, other]}
    assert obeys(schema, '{"v":null}') and obeys(schema, '{"v":5}')
    assert not obeys(schema, '{"v":6}')


@pytest.mark.parametrize(
    "schema",
    [
        {**an_object(a={"type": "integer"}), "patternProperties": {"^a$": {}}},
        {**an_object(a={}, b={}), "patternProperties": {"^(a|b)$": {"type": "null"}}},
        {"type": "object", "required": ["a"], "additionalProperties": False,
         "patternProperties": {"^a$": {"const": 1}}, "minProperties": 1},
        {"type": "object", "patternProperties": {"^[ab]$": {"$ref": "#/$defs/y"}},
         "$defs": {"y": {"$ref": "#/$defs/y"}}},
        {"allOf": [an_object(a={}), {"type": "object", "patternProperties": {"^a$": {}}}]},
        an_object(a={"type": "array", "items": {"$ref": "#"}}),
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": []},
    ],
)  # fmt: skip
def test_no_text_comes_to_a_place_where_nothing_may_follow(schema: Any) -> None:
    draw, start = random.Random(0), matcher_of(schema)
    likely = set(b'{}[]",:ab1n')
    for _ in range(30):
        matcher = start.deep_copy()
        for _ in range(60):
            mask = matcher.compute_bitmask()
            allowed = [i for i in range(256) if mask[i >> 3] >> (i & 7) & 1]
            assert not matcher.is_error()
            if not allowed:
                assert matcher.is_accepting()
                break
            chosen = [byte for byte in allowed if byte in likely] or allowed
            assert matcher.consume_token(draw.choice(chosen))


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("^(name|other)$", ["name", "other"]),
        ("^[+*]$", ["*", "+"]),
        (r"^a\+\*?$", ["a+", "a+*"]),
        ("^$", [""]),
        ("^p{1,2}$", ["p", "pp"]),
        (f"^({'|'.join(f'property_number_{i}' for i in range(20))})$", 20),
        ("^a*$", None),
        ("^a{2,}$", None),
        ("a", None),
        ("^.$", None),
        ("^.{1,200}$", None),
        ("^[a-z]{30}$", None),
        ("^(", None),
    ],
)
def test_the_texts_of_a_pattern_are_found_if_they_are_few(pattern: str, texts: Any) -> None:
    found = LibrarySchemas().texts(pattern, 64)
    if isinstance(texts, int):
        assert found is not None and len(found) == texts
    else:
        assert (None if found is None else sorted(found)) == texts


def test_whitespace_between_values_is_bounded() -> None:
    for schema in ({"type": "object"}, an_object(id={"const": BIG})):
        matcher = matcher_of(schema)
        assert matcher.try_consume_tokens(list(b"{\n" + b" " * 20)) == 22
        assert matcher.try_consume_tokens(list(b" ")) == 0
        assert matcher.try_consume_tokens(list(b"\n")) == 0
