"""Tokens of a tokenizer whose ids the model does not have: refused by name, and never generated."""

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer, models

from quadriga.errors import InvalidRequest
from quadriga.sampling.params import SamplingParams
from quadriga.sampling.validation import find_unserved_tokens
from quadriga.server.config.engine_args import ModelArgs
from quadriga.server.config.frontend_args import FrontendArgs
from quadriga.server.grammars.grammar import check_begins, compile_grammar, load_vocabulary
from quadriga.server.models.formats.tokenizer import load_tokenizer
from quadriga.server.models.resolve import ModelFiles, resolve_model
from quadriga.wire.client import ChatMessage, Detokenize, Generate, Tokenize, Tokens
from quadriga.wire.packing import pack_ids
from tests.tiny_models import PLAIN, SPECIAL, VOCAB_SIZE, add_unserved_tokens, tiny_llama
from tokenizer_proc.preparation.chat import ChatTemplate
from tokenizer_proc.preparation.encode import Encoder
from tokenizer_proc.preparation.prepare import Prepared, Preparer

RULE = f"ids of this model are 0 to {VOCAB_SIZE - 1}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    directory = add_unserved_tokens(tiny_llama(tmp_path_factory.mktemp("model") / "tiny"))
    return resolve_model(ModelArgs(model=str(directory)))


@pytest.fixture(scope="module")
def preparer(model: ModelFiles) -> Preparer:
    tokenizer = load_tokenizer(model.tokenizer_dir)
    encoder = Encoder(tokenizer, ChatTemplate(model.tokenizer_dir))
    unserved = find_unserved_tokens(tokenizer, model.vocab_size)
    return Preparer(FrontendArgs(), model, encoder, unserved)


def refusal(preparer: Preparer, message: Generate) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        preparer.prepare(message)
    return caught.value


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": f"a{SPECIAL}b"},
        {"prompt": [ChatMessage("user", f"a {PLAIN}")]},
        {"prompt": f"{SPECIAL}" + 300 * "a", "truncate_prompt": True},
        {"prompt": "", "prompt_token_ids": pack_ids([1, VOCAB_SIZE + 1])},
    ],
)
def test_a_prompt_with_such_a_token_is_refused_with_token_id_and_limit(
    fields: dict[str, Any], preparer: Preparer
) -> None:
    error = refusal(preparer, Generate(1, "r", **fields))
    assert RULE in str(error)
    assert f"{VOCAB_SIZE} (the token '{SPECIAL}')" in str(error) or (
        f"{VOCAB_SIZE + 1} (the token '{PLAIN}')" in str(error)
    )


SCHEMA = {"properties": {"a": {"const": f"x{SPECIAL}"}}}
TAG = {"type": "tag", "begin": SPECIAL, "content": {"type": "any_text"}, "end": "x"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_token_ids", [VOCAB_SIZE]),
        ("logit_bias", {VOCAB_SIZE: 1.0}),
        ("logprob_token_ids", [3, VOCAB_SIZE]),
        ("allowed_token_ids", [VOCAB_SIZE, 3]),
        ("bad_words", [f"a{SPECIAL}"]),
        ("choice", ["b", SPECIAL]),
        ("regex", SPECIAL),
        ("ebnf", f"start: {SPECIAL}"),
        ("json_schema", SCHEMA),
        ("json_schema", {"properties": {SPECIAL: True}}),
        ("structural_tag", {"format": TAG}),
        ("thinking_end", SPECIAL),
    ],
)
def test_a_parameter_with_such_a_token_is_refused_with_token_id_and_limit(
    field: str, value: object, preparer: Preparer
) -> None:
    params = SamplingParams(**{field: value})  # type: ignore[arg-type]
    error = refusal(preparer, Generate(1, "r", "a", params))
    assert str(error) == f"{field} holds {VOCAB_SIZE} (the token '{SPECIAL}'): {RULE}"
    assert error.field == field


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(json_schema={"type": "integer", "description": f"see {SPECIAL}"}),
        SamplingParams(choice=["beyond"]),
        SamplingParams(stop=[SPECIAL]),
        SamplingParams(bad_words=["beyond"]),
    ],
)
def test_text_that_does_not_have_to_be_such_a_token_is_not_refused(
    params: SamplingParams, preparer: Preparer
) -> None:
    assert isinstance(preparer.prepare(Generate(1, "r", "a", params)), Prepared)


def test_texts_and_ids_are_refused_where_they_are_converted(preparer: Preparer) -> None:
    with pytest.raises(InvalidRequest, match=r"prompt holds 512 \(the token"):
        preparer.convert(Tokenize(1, "r", f"a{SPECIAL}"))
    with pytest.raises(InvalidRequest, match=r"token_ids holds 513 \(the token"):
        preparer.convert(Detokenize(1, "r", pack_ids([VOCAB_SIZE + 1])))
    with pytest.raises(InvalidRequest, match=f"token_ids holds 99999: {RULE}"):
        preparer.convert(Detokenize(1, "r", pack_ids([99999])))
    assert isinstance(preparer.convert(Tokenize(1, "r", "a")), Tokens)


def test_one_line_names_the_tokens_and_the_limit(model: ModelFiles) -> None:
    unserved = find_unserved_tokens(load_tokenizer(model.tokenizer_dir), VOCAB_SIZE)
    assert unserved.note.startswith(
        "2 tokens of the tokenizer have ids that the model, whose ids are 0 to 511, does not have:"
        " '<|beyond|>' (512), '<|above|>' (513);"
    )
    many = find_unserved_tokens(load_tokenizer(model.tokenizer_dir), VOCAB_SIZE - 8)
    assert " and 5 more; " in many.note
    assert find_unserved_tokens(load_tokenizer(model.tokenizer_dir), VOCAB_SIZE + 2).note == ""


def test_an_id_far_beyond_the_number_of_tokens_is_found(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 70}, unk_token="a"))
    assert find_unserved_tokens(tokenizer, 50).texts == {70: "b"}
    assert find_unserved_tokens(tokenizer, 71).texts == {}


def allowed_by(grammar: str, model: ModelFiles, vocab_size: int) -> tuple[LLMatcher, set[int]]:
    """Return a matcher at its start, and the ids that it allows."""
    source = (model.tokenizer_dir / "tokenizer.json").read_text()
    matcher = compile_grammar(load_vocabulary(source, vocab_size, model.eos_token_ids), grammar)
    check_begins(matcher)
    mask = matcher.compute_bitmask()
    return matcher, {i for i in range(8 * len(mask)) if mask[i >> 3] >> (i & 7) & 1}


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 450, 300])
def test_a_grammar_allows_and_forces_only_the_models_ids(
    vocab_size: int, model: ModelFiles
) -> None:
    """Smaller models lack merges and what was merged from them, too."""
    _, allowed = allowed_by("start: /[a-z ]+/", model, vocab_size)
    assert allowed
    assert max(allowed) < vocab_size
    matcher, _ = allowed_by('start: "the tokenizer" /a+/', model, vocab_size)
    forced = matcher.compute_ff_tokens()
    assert forced
    assert max(forced) < vocab_size
    assert matcher.consume_tokens(forced)


def test_a_grammar_that_names_an_id_beyond_the_models_says_so(model: ModelFiles) -> None:
    with pytest.raises(ValueError, match=f"names the token id 600: {RULE}"):
        allowed_by("start: <[600]>", model, VOCAB_SIZE)


def test_ends_of_text_beyond_the_models_ids_are_left_out_and_named(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "tiny", eos_token_id=[2, 99999])
    files = resolve_model(ModelArgs(model=str(directory)))
    assert files.eos_token_ids == {0, 2}  # 0 is the tokenizer's own
    (note,) = files.notes
    assert note == (
        "eos_token_id names 99999, which the model, whose ids are 0 to 511, does not have: left out"
    )
    directory = tiny_llama(tmp_path / "other")
    config = json.loads((directory / "config.json").read_text()) | {"eos_token_id": [-1, 512]}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").unlink()
    (directory / "tokenizer_config.json").unlink()
    files = resolve_model(ModelArgs(model=str(directory)))
    assert files.eos_token_ids == frozenset()
    assert files.notes[0].endswith("left out; no other id ends a text")
