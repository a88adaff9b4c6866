"""Conversion and compilation of grammars with the llguidance library.

Imported by the frontend's grammar check and by the worker; only they load the library.
"""

import json
import re
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from quadriga.sampling.params import Grammar
from quadriga.server.grammars import exact_integers, json_schema
from quadriga.server.grammars.structural_tag import (
    Format,
    JsonValue,
    escape_slashes,
    read_structural_tag,
    to_lark,
)

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
_UNSERVED_ID = re.compile(r"Token range end too large: (\d+)")


# Bounds of the search for the texts of a pattern.
MAX_STATES_OF_PATTERN, MAX_BYTES_OF_TEXT = 1_000, 128


@cache
def byte_vocabulary() -> "LLTokenizer":
    """Return a vocabulary of single bytes."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


class LibrarySchemas:
    """A SchemaLibrary: compiles schemas over a vocabulary of single bytes."""

    def __init__(self) -> None:
        self._bytes = byte_vocabulary()
        self._texts: dict[str, list[str] | None] = {}
        self._errors: dict[str, str] = {}

    def error(self, schema: dict[str, Any]) -> str:
        """Return why the library cannot compile a schema, or an empty string."""
        text = json.dumps(schema)
        if text not in self._errors:
            self._errors[text] = ""
            try:
                check_begins(self._compiled(schema))
            except BaseException as error:  # a panic of the library is no Exception
                self._errors[text] = str(error) or type(error).__name__
        return self._errors[text]

    def accepts(self, schema: dict[str, Any], text: str) -> bool:
        """Return whether a text obeys the grammar of a schema."""
        try:
            matcher = self._compiled(schema)
        except ValueError:
            return False
        return _takes(matcher, text.encode()) and matcher.is_accepting()

    def texts(self, pattern: str, max_texts: int) -> list[str] | None:
        """Return the texts that a pattern matches; None if there are more than max_texts."""
        if pattern not in self._texts:
            is_finite = pattern.startswith("^") and pattern.endswith("$")
            is_finite = is_finite and not _repeats_without_end(pattern)
            self._texts[pattern] = self._search(pattern, max_texts) if is_finite else None
        return self._texts[pattern]

    def _compiled(self, schema: dict[str, Any]) -> "LLMatcher":
        return compile_grammar(self._bytes, _json_grammar(schema))

    def _search(self, pattern: str, max_texts: int) -> list[str] | None:
        try:
            states = [(self._compiled({"type": "string", "pattern": pattern}), b"")]
        except ValueError:
            return None
        found: dict[str, None] = {}
        for _ in range(MAX_STATES_OF_PATTERN):
            matcher, text = states.pop()
            if text:
                matcher = matcher.deep_copy()
                matcher.consume_token(text[-1])
            if matcher.is_accepting():
                found[json.loads(text)] = None
            mask = matcher.compute_bitmask()
            if matcher.is_error() or len(text) == MAX_BYTES_OF_TEXT or len(found) > max_texts:
                return None
            following = (i for i in range(256) if mask[i >> 3] >> (i & 7) & 1)
            states += [(matcher, text + bytes([byte])) for byte in following]
            if not states:
                return list(found)
        return None


def _repeats_without_end(pattern: str) -> bool:
    """Return whether a pattern has `*`, `+` or a repetition without an upper bound."""
    bare = re.sub(r"\\.", "x", pattern)
    bare = re.sub(r"\[[^\]]*\]", "x", bare)
    return re.search(r"[*+]|\{\d*,\}", bare) is not None


def _takes(matcher: "LLMatcher", text: bytes) -> bool:
    return matcher.try_consume_tokens(list(text)) == len(text)


def _json_grammar(schema: dict[str, Any]) -> str:
    from llguidance import LLMatcher

    options: Any = JSON_OPTIONS
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)


def to_library_form(
    grammar: Grammar,
    vocabulary: "LLTokenizer",
    *,
    finds_faults: bool = True,
    frees_lenient: bool = False,
) -> str:
    """Return the grammar as LLMatcher takes it.

    Args:
        grammar: the grammar of a client.
        vocabulary: llguidance's tokenizer.
        finds_faults: keywords of schemas that cannot be obeyed are refused, or left out of lenient
            schemas; it takes more time than to compile them.
        frees_lenient: lenient schemas allow any value of their types.

    Raises:
        ValueError: the grammar cannot be read, or a schema of it cannot be obeyed;
            `compile_grammar` finds other errors.
    """
    from llguidance import LLMatcher, grammar_from

    schemas = LibrarySchemas()

    def prepared(schema: Any) -> dict[str, Any]:
        return json_schema.prepared_schema(
            schema, schemas, finds_faults=finds_faults, frees_lenient=frees_lenient
        )

    if grammar.kind == "json_schema":
        schema = json_schema.parse_schema(grammar.text)
        if not isinstance(schema, dict):
            raise ValueError("the schema must be an object")
        ready = prepared(schema)
        if not exact_integers.holds_exact(ready):
            return _json_grammar(ready)
        tag: Format = JsonValue(json_schema=ready)
        return LLMatcher.grammar_from_lark(to_lark(tag, vocabulary, lambda _: ready, JSON_OPTIONS))
    if grammar.kind == "structural_tag":
        lark = to_lark(read_structural_tag(grammar.text), vocabulary, prepared, JSON_OPTIONS)
        return LLMatcher.grammar_from_lark(lark)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_lark(f"start: /{escape_slashes(grammar.text)}/")
    return grammar_from(grammar.kind, grammar.text)  # type: ignore[arg-type]


def load_vocabulary(tokenizer_json: str, vocab_size: int, eos_ids: frozenset[int]) -> "LLTokenizer":
    """Return the bytes of every token, as the library keeps them.

    A token with an id that the model does not have is left out: no mask allows it, and text that a
    grammar forces is never encoded with it.

    Args:
        tokenizer_json: contents of tokenizer.json.
        vocab_size: number of ids of the model; the tokenizer may have fewer, or more.
        eos_ids: ids of the model that end a text.
    """
    from llguidance import LLTokenizer

    served = _without_unserved_tokens(tokenizer_json, vocab_size)
    return LLTokenizer(served, n_vocab=vocab_size, eos_token=sorted(eos_ids) or None)


def _without_unserved_tokens(tokenizer_json: str, vocab_size: int) -> str:
    """Return a tokenizer.json without the tokens whose ids are not below `vocab_size`."""
    from tokenizers import Tokenizer

    content = msgspec.json.decode(tokenizer_json)
    model, added = content["model"], content.get("added_tokens") or []
    vocabulary = model["vocab"]
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    # The library chooses the ids of added tokens that its model does not have.
    if max(ids, default=0) + len(added) < vocab_size:
        return tokenizer_json
    all_ids = Tokenizer.from_str(tokenizer_json).get_vocab(with_added_tokens=True)
    unserved = {token for token, token_id in all_ids.items() if token_id >= vocab_size}
    if not unserved:
        return tokenizer_json
    content["added_tokens"] = [token for token in added if token["content"] not in unserved]
    if isinstance(vocabulary, dict):
        model["vocab"] = {token: i for token, i in vocabulary.items() if token not in unserved}
    else:
        model["vocab"] = vocabulary[:vocab_size]
    if "merges" in model:
        pairs = (pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"])
        model["merges"] = [p for p in pairs if not unserved.intersection((*p, "".join(p)))]
    return msgspec.json.encode(content).decode()


def compile_grammar(vocabulary: "LLTokenizer", text: str) -> "LLMatcher":
    """Return a matcher at its start. Raise ValueError that says what is wrong with the grammar."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(vocabulary, text, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
    if matcher.is_error():
        error = matcher.get_error().removesuffix("\n<non-verbose/>")
        if wrong := _UNSERVED_ID.search(error):
            rule = f"ids of this model are 0 to {vocabulary.vocab_size - 1}"
            raise ValueError(f"it names the token id {wrong[1]}: {rule}")
        raise ValueError(error)
    return matcher


def check_begins(matcher: "LLMatcher") -> None:
    """Raise ValueError if the grammar of a matcher at its start allows no first token.

    Such a grammar is, for example, a schema that refers to nothing but itself.
    """
    mask = matcher.compute_bitmask()
    if matcher.is_error() or not any(mask):
        raise ValueError("no text obeys it; does it refer to itself only?")
