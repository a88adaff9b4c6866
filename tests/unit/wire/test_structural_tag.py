"""Free text in which structures follow triggers."""

import json
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer

from quadriga.sampling.params import Grammar
from quadriga.server.grammars.grammar import compile_grammar, to_library_form
from tests.unit.tiny_vocabulary import tiny_vocabulary

END, THINK, CALL, CALL_END = 0, 512, 513, 514
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def vocabulary(llama_dir: Path) -> LLTokenizer:
    """With special tokens for calls, as some models have them."""
    return tiny_vocabulary(llama_dir, 520, "<think>", "<call>", "</call>")


def matcher(vocabulary: LLTokenizer, trigger: str, end: str) -> LLMatcher:
    names = ("rome", "oslo")
    structures = [
        {"begin": f'{trigger}{{"{name}": ', "schema": CITY, "end": f"}}{end}"} for name in names
    ]
    text = json.dumps({"structures": structures, "triggers": [trigger]})
    return compile_grammar(vocabulary, to_library_form(Grammar("structural_tag", text), vocabulary))


def taken(matcher: LLMatcher, vocabulary: LLTokenizer, text: str) -> str:
    """As much of the text as the grammar lets pass."""
    ids = vocabulary.tokenize_str(text, parse_special=True)
    count = matcher.try_consume_tokens(ids)
    return vocabulary.decode_str(ids[:count])


@pytest.mark.parametrize(("trigger", "end"), [("<call>", "</call>"), ("(call:", ":call)")])
def test_text_is_free_until_a_trigger_and_again_after_its_structure(
    vocabulary: LLTokenizer, trigger: str, end: str
) -> None:
    def obeys(text: str) -> bool:
        found = matcher(vocabulary, trigger, end)
        return taken(found, vocabulary, text) == text and found.is_accepting()

    call = f'{trigger}{{"oslo": {{"city": "x"}}}}{end}'
    assert obeys("")
    assert obeys("just < text\n, grüße 👋")
    assert obeys(f"Let me see. {call} and {call}{call} done")
    assert obeys("<think> hm")
    assert not obeys(call.replace("oslo", "lima"))
    assert not obeys(call.replace("city", "town"))
    assert not obeys(call.removesuffix(end)), "what has begun must be ended"


def test_an_invalid_structural_tag_is_refused_with_a_reason(vocabulary: LLTokenizer) -> None:
    structure = {"begin": "<a>", "end": "</a>"}
    for tag, why in [
        ("{", "truncated"),
        ({"structures": [structure]}, "triggers"),
        ({"structures": [structure], "triggers": ["<b>"]}, "no trigger"),
        ({"structures": [structure], "triggers": ["<a", "<b"]}, "no structure begins"),
        ({"structures": [{**structure, "x": 1}], "triggers": ["<a"]}, "unknown field"),
        ({"structures": [], "triggers": []}, "at least one"),
    ]:
        text = tag if isinstance(tag, str) else json.dumps(tag)
        with pytest.raises(ValueError, match=why):
            to_library_form(Grammar("structural_tag", text), vocabulary)


CONST = {"type": "const_string", "value": "<call>"}
CITY_VALUE = {"type": "json_schema", "json_schema": CITY}
FREE = {"type": "any_text"}
TAG = {"type": "tag", "begin": "<a=", "content": FREE, "end": "</a>"}
OF_TEXT = {"type": "triggered_tags", "triggers": ["<a"], "tags": [TAG]}
SEPARATED = {"type": "tags_with_separator", "tags": [TAG], "separator": ", "}


@pytest.mark.parametrize(
    ("tag_format", "obeying", "others"),
    [
        (CONST, ["<call>"], ["", "<cal", "<call>x"]),
        (CITY_VALUE, ['{"city": "x"}'], ["{}", "x"]),
        ({"type": "regex", "pattern": "[0-9]+/x"}, ["12/x"], ["x", "12/"]),
        ({"type": "sequence", "elements": [CONST, FREE, CONST]},
         ["<call><call>", "<call>some\ntext<call>"], ["<call>", "<call><call>x"]),
        ({"type": "or", "elements": [CONST, TAG]}, ["<call>", "<a=x</a>"], ["", "<call><a=x</a>"]),
        (TAG, ["<a=</a>", "<a=1 < 2</b></a>"], ["<a=x</a>y</a>", "<a=x"]),
        (OF_TEXT, ["", "text", "x <a=1</a> y<a=2</a>"], ["<a>", "<a=x"]),
        (OF_TEXT | {"at_least_one": True}, ["<a=1</a>", "x <a=1</a> y<a=2</a> z"], ["", "x"]),
        (OF_TEXT | {"stop_after_first": True}, ["", "x", "x<a=1</a>"], ["x<a=1</a>y"]),
        (SEPARATED, ["", "<a=1</a>", "<a=1</a>, <a=2</a>, <a=2</a>"], ["<a=1</a>, ", "x"]),
        (SEPARATED | {"at_least_one": True}, ["<a=1</a>", "<a=1</a>, <a=2</a>"], [""]),
        (SEPARATED | {"stop_after_first": True}, ["", "<a=1</a>"], ["<a=1</a>, <a=2</a>"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("special_tokens", [(), ("<call>", "</a>")])
def test_a_format_allows_its_texts_and_no_others(
    llama_dir: Path, special_tokens: tuple[str, ...], tag_format: object,
    obeying: list[str], others: list[str],
) -> None:  # fmt: skip
    vocabulary = tiny_vocabulary(llama_dir, 520, *special_tokens)
    grammar = Grammar("structural_tag", json.dumps({"format": tag_format}))
    beginning = compile_grammar(vocabulary, to_library_form(grammar, vocabulary))

    def obeys(text: str) -> bool:
        found = beginning.deep_copy()
        return taken(found, vocabulary, text) == text and found.is_accepting()

    assert [text for text in obeying if not obeys(text)] == []
    assert [text for text in others if obeys(text)] == []


@pytest.mark.parametrize(
    ("tag", "why"),
    [
        ({"format": CONST, "triggers": ["a"]}, "either format"),
        ({"format": {"type": "or", "elements": []}}, "at least one alternative"),
        ({"format": OF_TEXT | {"tags": []}}, "at least one tag"),
        ({"format": {"type": "json_schema", "json_schema": False}}, "no value obeys"),
        ({"format": {"type": "no_such_part"}}, "no_such_part"),
    ],
)
def test_a_format_that_contradicts_itself_is_refused(
    vocabulary: LLTokenizer, tag: object, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        to_library_form(Grammar("structural_tag", json.dumps(tag)), vocabulary)


def test_a_format_of_many_levels_is_refused(vocabulary: LLTokenizer) -> None:
    nested = '{"type": "sequence", "elements": [' * 5000 + "]}" * 5000
    with pytest.raises(ValueError, match="nested too deeply"):
        to_library_form(Grammar("structural_tag", f'{{"format": {nested}}}'), vocabulary)
