"""Free text in which structures follow triggers."""

import json
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer

from quadriga.sampling.grammar import compile_grammar, to_library_form
from quadriga.sampling.params import Grammar
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
