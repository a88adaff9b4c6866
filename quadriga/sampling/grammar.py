"""Grammars that a text must obey: what a client may give, in the form that llguidance takes.

Imported by the front door's check and by the worker, which alone load the library.
"""

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from quadriga.errors import InvalidRequest
from quadriga.sampling.structural_tag import read_structural_tag, to_lark

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from quadriga.sampling.params import SamplingParams

FIELDS = ("json_schema", "regex", "ebnf", "choice", "structural_tag")
"""Of SamplingParams; one of them at most."""
LINE_BREAKS_AND_SPACES = r" |\n[ \t]{0,20}"
"""What may stand between the tokens of JSON. Anything at all, and a weak model never ends."""
JSON_OPTIONS: dict[str, Any] = {
    "whitespace_pattern": LINE_BREAKS_AND_SPACES,
    "whitespace_flexible": True,
    "coerce_one_of": True,
}
LIMITS: dict[str, Any] = {
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
"""Of one step of one request, so that no grammar can hold the batch up for long: of 27 hostile ones
the worst took 40 ms in one step."""

_TO_ESCAPE = re.compile(r"\\.|/")


class Grammar(NamedTuple):
    """kind: one of FIELDS. text: as the client gave it; JSON for a schema and for choices."""

    kind: str
    text: str


def grammar_of(params: "SamplingParams") -> Grammar | None:
    """The grammar that a request asks for. InvalidRequest for a schema that is no JSON."""
    for kind in FIELDS:
        value = getattr(params, kind)
        if value is not None:
            return Grammar(kind, value if isinstance(value, str) else _as_json(kind, value))
    return None


def _as_json(kind: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{kind} cannot be written as JSON: {error}", kind) from None


def without_grammar(params: "SamplingParams") -> "SamplingParams":
    """A copy of the other parameters."""
    return msgspec.structs.replace(params, **dict.fromkeys(FIELDS))


def to_library_form(grammar: Grammar, vocabulary: "LLTokenizer") -> str:
    """What LLMatcher takes. ValueError for a grammar that cannot be read; others are found out by
    `compile_grammar` only."""
    from llguidance import LLMatcher, grammar_from

    if grammar.kind == "json_schema":
        options: Any = JSON_OPTIONS
        return LLMatcher.grammar_from_json_schema(grammar.text, overrides=options)
    if grammar.kind == "structural_tag":
        tag = read_structural_tag(grammar.text)
        return LLMatcher.grammar_from_lark(to_lark(tag, vocabulary, JSON_OPTIONS))
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_lark(f"start: /{_escape_slashes(grammar.text)}/")
    return grammar_from(grammar.kind, grammar.text)  # type: ignore[arg-type]


def _escape_slashes(pattern: str) -> str:
    """Return the inside of a Lark regex. The library's own conversion differs: it writes a line
    break as an escape, which ends no comment of (?x), and drops a backslash at the end."""
    return _TO_ESCAPE.sub(lambda found: "\\/" if found[0] == "/" else found[0], pattern)


def load_vocabulary(tokenizer_json: str, vocab_size: int, eos_ids: frozenset[int]) -> "LLTokenizer":
    """The bytes of every token. tokenizer_json: the file's contents. vocab_size: of the model,
    which may have more ids than the tokenizer; ValueError where it has fewer."""
    from llguidance import LLTokenizer

    return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=sorted(eos_ids) or None)


def compile_grammar(vocabulary: "LLTokenizer", text: str) -> "LLMatcher":
    """A matcher at its beginning. ValueError that says what is wrong with the grammar."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(vocabulary, text, log_level=0, limits=LLParserLimits(**LIMITS))
    if matcher.is_error():
        raise ValueError(matcher.get_error().removesuffix("\n<non-verbose/>"))
    return matcher


def check_begins(matcher: "LLMatcher") -> None:
    """Raise ValueError where no text obeys the grammar of a matcher at its beginning, as for a
    schema that refers to itself and to nothing else: not even a first token may come."""
    mask = matcher.compute_bitmask()
    if matcher.is_error() or not any(mask):
        raise ValueError("no text obeys it; does it refer to itself only?")
