"""Sampling over ZMQ and HTTP against `transformers` with its own logits processors, in float32.

The same ids, seeds and parameters give the same tokens. This file adds what transformers lacks:
frequency and presence penalties, and a draw that depends on the seed and the position.
"""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from quadriga.client import Client, SamplingParams
from tests.gateway import MODEL
from tests.server import Server
from worker_proc.sampling.sampler import uniform

PROMPT = [7, 30, 31, 32, 30, 31, 90, 91, 30, 31, 60, 61, 62, 63, 64, 65, 66, 67, 68, 69]
TOKENS, VOCAB_SIZE = 16, 512
BARRED: dict[str, Any] = {"logit_bias": {"40": 3.0, "444": -100.0}, "bad_words": ["thought", "2"]}
SETS: dict[str, dict[str, Any]] = {
    "repetition above 1": {"repetition_penalty": 1.6},
    "repetition below 1": {"repetition_penalty": 0.6},
    "frequency": {"frequency_penalty": 1.2},
    "presence": {"presence_penalty": -1.5},
    "bias": {"logit_bias": {"40": 3.0, "444": -100.0}},
    "bad words": {"bad_words": ["thought", "ver", "2"]},
    "allowed ids": {"allowed_token_ids": list(range(100, 140))},
    "penalties and bars": {"repetition_penalty": 1.3, "frequency_penalty": 0.7,
                           "presence_penalty": -0.4, **BARRED},
    "temperature": {"temperature": 0.8, "seed": 11},
    "min_p": {"temperature": 1.5, "min_p": 0.3, "seed": 2**63 - 1},
    "smallest min_p": {"temperature": 5.0, "min_p": 1.0, "seed": 4},
    "top_k, top_p": {"temperature": 1.3, "top_k": 40, "top_p": 0.8, "seed": 5},
    "everything": {"temperature": 1.2, "top_k": 100, "top_p": 0.95, "min_p": 0.01, "seed": 6,
                   "repetition_penalty": 1.2, "frequency_penalty": 0.5, **BARRED},
}  # fmt: skip


class CountPenalties(LogitsProcessor):
    """OpenAI's frequency and presence penalties of the generated tokens."""

    def __init__(self, frequency: float, presence: float) -> None:
        self._frequency, self._presence = frequency, presence

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.bincount(input_ids[0, len(PROMPT) :], minlength=VOCAB_SIZE)
        return scores - self._frequency * counts - self._presence * (counts > 0)


class Draw(LogitsProcessor):
    """Keep the token at which the cumulated probabilities pass the position's random number."""

    def __init__(self, seed: int) -> None:
        self._seed = torch.tensor([seed])

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        number = uniform(self._seed, torch.tensor([input_ids.shape[1]]))
        cumulated = scores.softmax(-1).cumsum(-1)
        drawn = torch.searchsorted(cumulated, number[:, None] * cumulated[:, -1:], right=True)
        return torch.full_like(scores, float("-inf")).scatter(1, drawn, 0.0)


def processors(fields: dict[str, Any], tokenizer: Tokenizer) -> Iterator[LogitsProcessor]:
    """Yield the processors in the order of docs/sampling.md."""
    if bias := fields.get("logit_bias"):
        yield SequenceBiasLogitsProcessor([[[int(i)], b] for i, b in bias.items()])
    if "repetition_penalty" in fields:
        yield RepetitionPenaltyLogitsProcessor(fields["repetition_penalty"])
    yield CountPenalties(fields.get("frequency_penalty", 0), fields.get("presence_penalty", 0))
    if allowed := fields.get("allowed_token_ids"):
        yield SuppressTokensLogitsProcessor([i for i in range(VOCAB_SIZE) if i not in allowed])
    if words := fields.get("bad_words"):
        texts = [text for word in words for text in (word, " " + word)]
        yield NoBadWordsLogitsProcessor([tokenizer.encode(text).ids for text in texts])
    if stop := fields.get("stop_token_ids"):
        minimum = fields.get("min_new_tokens", 0)
        yield MinNewTokensLengthLogitsProcessor(len(PROMPT), minimum, stop)
    if "temperature" in fields:
        yield TemperatureLogitsWarper(fields["temperature"])
        yield TopKLogitsWarper(fields.get("top_k", VOCAB_SIZE))
        yield TopPLogitsWarper(fields.get("top_p", 1.0))
        yield MinPLogitsWarper(fields.get("min_p", 0.0))
        yield Draw(fields["seed"])


@torch.inference_mode()
def by_transformers(model: Any, tokenizer: Tokenizer, fields: dict[str, Any]) -> list[int]:
    output = model.generate(
        torch.tensor([PROMPT]),
        max_new_tokens=TOKENS,
        do_sample=False,
        eos_token_id=fields.get("stop_token_ids"),
        pad_token_id=0,
        logits_processor=LogitsProcessorList(processors(fields, tokenizer)),
    )
    return output[0, len(PROMPT) :].tolist()


def post(url: str, body: Any) -> Any:
    with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=30) as answer:
        return json.load(answer)


def served(server: Server, gateway: str, fields: dict[str, Any]) -> list[int]:
    """Return the tokens, after a check that ZMQ and both HTTP endpoints give the same."""
    fields = {"temperature": 0, "ignore_eos": True, **fields}
    bias = {int(token): value for token, value in fields.get("logit_bias", {}).items()}
    with Client(server.endpoint) as client:
        params = SamplingParams(**{**fields, "logit_bias": bias, "max_new_tokens": TOKENS})
        ring = client.generate(PROMPT, params)
    sgl = dict(fields, max_new_tokens=TOKENS)
    sgl |= {"sampling_seed": sgl.pop("seed")} if "seed" in sgl else {}
    native = post(f"{gateway}/generate", {"input_ids": PROMPT, "sampling_params": sgl})
    fields = dict(fields, max_tokens=TOKENS)
    fields |= {"min_tokens": fields.pop("min_new_tokens")} if "min_new_tokens" in fields else {}
    answer = post(f"{gateway}/v1/completions", {"model": MODEL, "prompt": PROMPT, **fields})
    assert native["output_ids"] == ring.token_ids
    assert answer["usage"]["completion_tokens"] == len(ring.token_ids)
    assert answer["choices"][0]["text"] == native["text"] == ring.text
    return list(ring.token_ids)


@pytest.fixture(scope="module")
def tokenizer(llama_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(llama_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def argmax(model: Any, tokenizer: Tokenizer) -> list[int]:
    return by_transformers(model, tokenizer, {})


@pytest.mark.parametrize("name", SETS)
def test_tokens_are_the_same_by_all_ways(
    server: Server, gateway: str, model: Any, tokenizer: Tokenizer, argmax: list[int], name: str
) -> None:
    expected = by_transformers(model, tokenizer, SETS[name])
    assert served(server, gateway, SETS[name]) == expected
    assert (expected != argmax) == (name != "smallest min_p"), "the parameters change something"


def test_an_end_that_may_not_come_yet_comes_when_it_may(
    server: Server, gateway: str, model: Any, tokenizer: Tokenizer, argmax: list[int]
) -> None:
    stop = argmax[2]
    lengths = []
    for minimum in (0, 9):
        fields = {"stop_token_ids": [stop], "min_new_tokens": minimum, "repetition_penalty": 0.9}
        expected = by_transformers(model, tokenizer, fields)
        assert served(server, gateway, fields) == expected
        lengths.append(len(expected))
    assert lengths[0] < 9 < lengths[1]
