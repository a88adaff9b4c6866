"""Conversion and compilation of grammars with the llguidance library.

Imported by the frontend's grammar check and by the worker; only they load the library.
"""

from typing import TYPE_CHECKING, Any

from quadriga.sampling.params import Grammar
from quadriga.sampling.structural_tag import escape_slashes, read_structural_tag, to_lark

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Whitespace allowed between JSON tokens; a weak model never ends if any whitespace is allowed.
JSON_WHITESPACE = r" |\n[ \t]{0,20}"
JSON_OPTIONS: dict[str, Any] = {
    "whitespace_pattern": JSON_WHITESPACE,
    "whitespace_flexible": True,
    "coerce_one_of": True,
}
# Bounds of one parser step, so that no grammar delays a batch for long: of 27 hostile grammars the
# worst took 40 ms in one step.
PARSER_LIMITS: dict[str, Any] = {
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}


def to_library_form(grammar: Grammar, vocabulary: "LLTokenizer") -> str:
    """Return the grammar as LLMatcher takes it.

    Raises:
        ValueError: the grammar cannot be read; `compile_grammar` finds other errors.
    """
    from llguidance import LLMatcher, grammar_from

    if grammar.kind == "json_schema":
        options: Any = JSON_OPTIONS
        return LLMatcher.grammar_from_json_schema(grammar.text, overrides=options)
    if grammar.kind == "structural_tag":
        tag_format = read_structural_tag(grammar.text)
        return LLMatcher.grammar_from_lark(to_lark(tag_format, vocabulary, JSON_OPTIONS))
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_lark(f"start: /{escape_slashes(grammar.text)}/")
    return grammar_from(grammar.kind, grammar.text)  # type: ignore[arg-type]


def load_vocabulary(tokenizer_json: str, vocab_size: int, eos_ids: frozenset[int]) -> "LLTokenizer":
    """Return the bytes of every token, as the library keeps them.

    Args:
        tokenizer_json: contents of tokenizer.json.
        vocab_size: number of ids of the model, which may exceed the tokenizer's.
        eos_ids: ids that end a text.

    Raises:
        ValueError: the model has fewer ids than the tokenizer.
    """
    from llguidance import LLTokenizer

    return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=sorted(eos_ids) or None)


def compile_grammar(vocabulary: "LLTokenizer", text: str) -> "LLMatcher":
    """Return a matcher at its start. Raise ValueError that says what is wrong with the grammar."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(vocabulary, text, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
    if matcher.is_error():
        raise ValueError(matcher.get_error().removesuffix("\n<non-verbose/>"))
    return matcher


def check_begins(matcher: "LLMatcher") -> None:
    """Raise ValueError if the grammar of a matcher at its start allows no first token.

    Such a grammar is, for example, a schema that refers to nothing but itself.
    """
    mask = matcher.compute_bitmask()
    if matcher.is_error() or not any(mask):
        raise ValueError("no text obeys it; does it refer to itself only?")
