"""Pairs of texts: ids and types of tokens, and what is cut, as by the tokenizers library."""

import itertools
import json
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from quadriga.errors import InvalidRequest, PromptTooLong
from quadriga.sampling.pooling import (
    CLASSIFY,
    IDENTITY,
    LOGPROBS,
    MEAN,
    PROBABILITIES,
    SCORE,
    SIGMOID,
    SOFTMAX,
    Pooling,
)
from quadriga.server.models.formats.tokenizer import load_tokenizer
from quadriga.wire.client import PROTOCOL_VERSION, ChatMessage, Generate
from quadriga.wire.packing import unpack_ids
from tests.tiny_encoders import CLASSIFIERS, CONTEXT_LENGTH, tiny_bert
from tests.unit.tokenizer.pairs import pooling_of, prepared, preparer_of
from tokenizer_proc.preparation.chat import ChatTemplate
from tokenizer_proc.preparation.encode import Encoder

TEXTS = ["", "a", "the dog", "the lazy dog sleeps " * 9, "four horses and 👋🏽 你好 " * 40]


@pytest.mark.parametrize("family", list(CLASSIFIERS))
@pytest.mark.parametrize("limit", [None, 6, 7, 30, CONTEXT_LENGTH])
def test_ids_types_and_cuts_are_those_of_tokenizers(
    family: str, limit: int | None, tmp_path: Path
) -> None:
    directory = CLASSIFIERS[family](tmp_path / "model")
    encoder = Encoder(load_tokenizer(directory), ChatTemplate(directory, None))
    reference = Tokenizer.from_file(str(directory / "tokenizer.json"))
    if limit is not None:
        reference.enable_truncation(limit, strategy="longest_first")
    for first, second in itertools.product(TEXTS, TEXTS):
        expected = reference.encode(first, second)
        ids, num_first = encoder.encode_pair(first, second, Pooling(), limit)
        assert ids.tolist() == expected.ids
        types = [int(bool(num_first) and place >= num_first) for place in range(len(ids))]
        assert types == expected.type_ids


def test_the_second_text_is_cut_by_itself(tmp_path: Path) -> None:
    preparer = preparer_of(CLASSIFIERS["bert"](tmp_path / "model"))
    whole = Pooling(CLASSIFY, text_pair="a b c d e f")
    request = prepared(preparer, "x", msgspec.structs.replace(whole, max_second_tokens=2))
    assert request.prompt_token_ids == (
        prepared(preparer, "x", Pooling(CLASSIFY, text_pair="a b")).prompt_token_ids
    )


def test_a_prepared_pair_has_no_text_and_the_models_activation(tmp_path: Path) -> None:
    ranker = preparer_of(CLASSIFIERS["bert"](tmp_path / "ranker"))
    asked = Pooling(CLASSIFY, text_pair="the dog", num_first=77)
    request = prepared(ranker, "who", asked)
    pooling = pooling_of(request)
    assert (pooling.text_pair, pooling.activation, pooling.whole) == (None, IDENTITY, True)
    assert 0 < pooling.num_first < len(unpack_ids(request.prompt_token_ids or b""))
    for asked_for, used in ((SIGMOID, SIGMOID), (PROBABILITIES, SIGMOID)):
        one = prepared(ranker, "who", Pooling(CLASSIFY, activation=asked_for))
        assert pooling_of(one).activation == used
        assert pooling_of(one).num_first == 0
    classifier = preparer_of(CLASSIFIERS["roberta"](tmp_path / "classifier"))
    assert pooling_of(prepared(classifier, "who", Pooling(CLASSIFY))).activation == SOFTMAX


def test_what_cannot_be_scored_is_refused_with_the_remedy(tmp_path: Path) -> None:
    ranker = preparer_of(CLASSIFIERS["bert"](tmp_path / "ranker"))
    encoder = preparer_of(tiny_bert(tmp_path / "encoder"))
    classifier = preparer_of(CLASSIFIERS["roberta"](tmp_path / "classifier"))
    pair, long = Pooling(CLASSIFY, text_pair="b"), "dog " * 99
    for preparer, prompt, pooling, words in (
        (encoder, "a", pair, "has no scores"),
        (encoder, [ChatMessage("user", "a")], Pooling(), r"an encoder \(bert\), which makes"),
        (encoder, "a", Pooling(MEAN, text_pair="b"), "scored by the method score"),
        (ranker, "a", Pooling(), "neither text nor embeddings: use /rerank"),
        (ranker, "a", Pooling(LOGPROBS, token_ids=[1]), "neither text nor embeddings: use /rerank"),
        (ranker, "a", Pooling(SCORE, text_pair="b", instruction="x"), "reads no instruction"),
        (classifier, "a", Pooling(SCORE, text_pair="b"), r"has 3 scores \(negative, neutral"),
        (ranker, "a", Pooling(CLASSIFY, activation="tanh"), "must be one of identity, sigmoid"),
        (ranker, "a", Pooling(CLASSIFY, max_second_tokens=0), "at least 1 token"),
        (ranker, [ChatMessage("user", "a")], pair, "a pair is two texts"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            prepared(preparer, prompt, pooling)
    with pytest.raises(InvalidRequest, match=r"is a classifier .* use /rerank"):
        ranker.prepare(Generate(PROTOCOL_VERSION, "r", "a"))
    with pytest.raises(PromptTooLong, match=f"the model's context is {CONTEXT_LENGTH}"):
        prepared(ranker, long, Pooling(CLASSIFY, text_pair=long))
    cut = prepared(ranker, long, Pooling(CLASSIFY, text_pair=long), truncate_prompt=True)
    assert len(unpack_ids(cut.prompt_token_ids or b"")) == CONTEXT_LENGTH


def test_a_tokenizer_without_a_form_of_pairs_is_refused(tmp_path: Path) -> None:
    directory = CLASSIFIERS["bert"](tmp_path / "model")
    tokenizer = load_tokenizer(directory)
    tokenizer.post_processor = TemplateProcessing(
        single="$A [SEP]", pair="$B:1 [SEP]:1 $A", special_tokens=[("[SEP]", 3)]
    )
    encoder = Encoder(tokenizer, ChatTemplate(directory, None))
    with pytest.raises(InvalidRequest, match="no form of a pair"):
        encoder.encode_pair("a", "b", Pooling(), None)


def test_the_models_prompt_is_put_before_a_text_and_not_before_a_pair(tmp_path: Path) -> None:
    directory = tiny_bert(tmp_path / "model")
    files = {
        "modules": [{"type": "x.Transformer"}, {"type": "x.Pooling", "path": ""}],
        "config_sentence_transformers": {"prompts": {"query": "the dog "}},
    }
    config = json.loads((directory / "config.json").read_text())
    files["config"] = config | {"pooling_mode_mean_tokens": True}
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    preparer = preparer_of(directory)
    plain = prepared(preparer, "sleeps", Pooling()).prompt_token_ids
    whole = prepared(preparer, "the dog sleeps", Pooling()).prompt_token_ids
    assert prepared(preparer, "sleeps", Pooling(prompt_name="query")).prompt_token_ids == whole
    assert prepared(preparer, "sleeps", Pooling(prompt_name="")).prompt_token_ids == plain != whole
    with pytest.raises(InvalidRequest, match="the prompts query"):
        prepared(preparer, "sleeps", Pooling(prompt_name="passage"))
