"""Prompts of models that make text and rank, such as Qwen3-Reranker."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from quadriga.errors import InvalidRequest, ModelError, PromptTooLong
from quadriga.sampling.pooling import CLASSIFY, IDENTITY, LOGPROBS, SCORE, SIGMOID, Pooling
from quadriga.wire.packing import pack_ids, unpack_ids
from tests.tiny_models import tiny_llama, tiny_qwen3
from tests.tiny_rankers import CONTEXT_LENGTH, INSTRUCTION, qwen3_reranker, sentence_reranker
from tests.unit.tokenizer.pairs import pooling_of, prepared, preparer_of

QWEN3_PROMPT = (
    "<|im_start|>system\n"
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided"
    '. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {}\n<Query>: who?\n<Document>: The dog.<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
PAIR = Pooling(SCORE, text_pair="The dog.")


def ids_of(directory: Path, text: str) -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text).ids
    return ids


@pytest.mark.parametrize("says", ["name", "config"])
def test_qwen3_reranker_has_its_own_prompt_and_scores_by_yes_and_no(
    says: str, tmp_path: Path
) -> None:
    tokens = {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True,
              "architectures": ["Qwen3ForSequenceClassification"]}  # fmt: skip
    name, config = ("Qwen3-Reranker-0.6B", None) if says == "name" else ("other", tokens)
    directory = qwen3_reranker(tmp_path / name, config)
    preparer = preparer_of(directory)
    default = "Given a web search query, retrieve relevant passages that answer the query"
    for pooling, instruction in (
        (PAIR, default),
        (Pooling(SCORE, text_pair="The dog.", instruction="Find dogs."), "Find dogs."),
    ):
        request = prepared(preparer, "who?", pooling)
        text = QWEN3_PROMPT.format(instruction)
        assert list(unpack_ids(request.prompt_token_ids or b"")) == ids_of(directory, text)
        asked = pooling_of(request)
        assert (asked.method, asked.activation, asked.whole) == (CLASSIFY, SIGMOID, False)
        assert (asked.text_pair, asked.instruction, asked.num_read) == (None, "", 1)
        assert asked.token_ids == [ids_of(directory, word)[0] for word in ("yes", "no")]


def test_a_directory_of_sentence_transformers_has_its_template_prompt_and_activation(
    tmp_path: Path,
) -> None:
    directory = sentence_reranker(tmp_path / "model")
    request = prepared(preparer_of(directory), "who?", PAIR)
    text = f"{INSTRUCTION}\n<|im_start|>Query: who?\nDocument: The dog.<|im_end|>"
    assert list(unpack_ids(request.prompt_token_ids or b"")) == ids_of(directory, text)
    assert pooling_of(request).activation == IDENTITY


def test_the_end_of_the_document_is_cut_and_what_follows_it_stays(tmp_path: Path) -> None:
    directory = qwen3_reranker(tmp_path / "qwen3-reranker")
    preparer = preparer_of(directory)
    long = Pooling(SCORE, text_pair="The lazy dog " * CONTEXT_LENGTH)
    with pytest.raises(PromptTooLong, match=f"pair of texts has .* context is {CONTEXT_LENGTH}"):
        prepared(preparer, "who?", long)
    request = prepared(preparer, "who?", long, truncate_prompt=True)
    ids = list(unpack_ids(request.prompt_token_ids or b""))
    end = ids_of(directory, "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert len(ids) == CONTEXT_LENGTH
    assert ids[-len(end) :] == end
    for document in ("a", "assistant", ""):  # parts of what follows it
        asked = Pooling(SCORE, text_pair=document)
        with pytest.raises(PromptTooLong):
            prepared(preparer, "The lazy dog " * CONTEXT_LENGTH, asked, truncate_prompt=True)
    short = Pooling(SCORE, text_pair="a b c d e f", max_first_tokens=2, max_second_tokens=3)
    cut = Tokenizer.from_file(str(directory / "tokenizer.json"))
    first, second = (cut.decode(ids_of(directory, text)[:count], skip_special_tokens=False)
                     for text, count in (("who, and", 2), ("a b c d e f", 3)))  # fmt: skip
    one = prepared(preparer, "who, and", short)
    other = prepared(preparer, first, Pooling(SCORE, text_pair=second))
    assert one.prompt_token_ids == other.prompt_token_ids


def test_what_it_cannot_score_is_refused_and_it_still_makes_text(tmp_path: Path) -> None:
    preparer = preparer_of(qwen3_reranker(tmp_path / "qwen3-reranker"))
    with pytest.raises(InvalidRequest, match="scores pairs of texts: give a second text"):
        prepared(preparer, "who?", Pooling(CLASSIFY))
    assert pooling_of(prepared(preparer, "who?", Pooling(LOGPROBS, token_ids=[1]))).token_ids == [1]
    plain = preparer_of(tiny_qwen3(tmp_path / "plain"))
    with pytest.raises(InvalidRequest, match="has no scores: serve a cross-encoder"):
        prepared(plain, "who?", PAIR)


@pytest.mark.parametrize("asked", [Pooling(LOGPROBS, num_last=2), Pooling(LOGPROBS, token_ids=[1])])
def test_a_prompt_at_whose_end_probabilities_are_asked_for_is_never_cut(
    asked: Pooling, tmp_path: Path
) -> None:
    preparer = preparer_of(tiny_qwen3(tmp_path / "model", max_position_embeddings=32))
    for text, ids in (("The lazy dog " * 32, None), ("", pack_ids([5] * 33))):
        with pytest.raises(PromptTooLong, match=r"the model's context is 32; shorten it$"):
            prepared(preparer, text, asked, truncate_prompt=True, prompt_token_ids=ids)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["no", "yes"], "is . tokens of its"),
        (["no"], "texts of two tokens"),
        ("no", "texts of two"),
    ],
)
def test_tokens_that_are_none_are_refused_at_the_start(
    tokens: object, words: str, tmp_path: Path
) -> None:
    directory = tiny_qwen3(tmp_path / "model")
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"classifier_from_token": tokens}))
    with pytest.raises(ModelError, match=words):
        preparer_of(directory)


def test_a_model_without_a_form_of_pairs_is_refused_at_the_start(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "model")
    path = directory / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"classifier_from_token": ["n", "y"]})
    )
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(ModelError, match="shows no messages of the roles query and document"):
        preparer_of(directory)
