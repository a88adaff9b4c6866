"""Bias, penalties and masks give the same logits as the processors of transformers."""

import random
from array import array
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
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

from quadriga.wire.packing import pack_floats, pack_ids
from quadriga.wire.worker import SlotSamplingParams
from worker_proc.sampling.logits_processors import RowLogits, SlotLogits, apply_logits_processors
from worker_proc.sampling.sampler import SamplingRows, _threshold

CPU = torch.device("cpu")
VOCAB = 40
CONTEXT = 64

ids = st.integers(0, VOCAB - 1)
factors = st.sampled_from([0.5, 1.0, 1.3, 2.0])
penalties = st.sampled_from([-2.0, 0.0, 0.7, 2.0])
asked = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": factors,
        "frequency_penalty": penalties,
        "presence_penalty": penalties,
        "bias": st.dictionaries(ids, st.sampled_from([-100.0, -1.5, 3.0, 100.0]), max_size=5),
        "allowed": st.lists(ids, min_size=1, max_size=VOCAB),
        "bad_words": st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=4),
        "min_new_tokens": st.integers(0, 6),
        "stop_ids": st.lists(ids, min_size=1, max_size=3, unique=True),
    },
)
histories = st.lists(st.integers(0, 6), min_size=1, max_size=30)


class GeneratedPenalties:
    """Frequency and presence penalties as OpenAI defines them, over the tokens after the prompt."""

    def __init__(self, num_prompt: int, frequency: float, presence: float) -> None:
        self.num_prompt, self.frequency, self.presence = num_prompt, frequency, presence

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.bincount(input_ids[0, self.num_prompt :], minlength=VOCAB)
        return scores - self.frequency * counts - self.presence * (counts > 0)


def rules_of(wanted: dict[str, Any], num_prompt: int) -> SlotSamplingParams:
    bias = wanted.get("bias", {})
    return SlotSamplingParams(
        num_prompt=num_prompt,
        repetition_penalty=wanted.get("repetition_penalty", 1.0),
        frequency_penalty=wanted.get("frequency_penalty", 0.0),
        presence_penalty=wanted.get("presence_penalty", 0.0),
        bias_ids=pack_ids(bias),
        bias=pack_floats(bias.values()),
        allowed_ids=pack_ids(wanted.get("allowed", [])),
        bad_words=[pack_ids(word) for word in wanted.get("bad_words", [])],
        min_new_tokens=wanted.get("min_new_tokens", 0),
        stop_ids=pack_ids(wanted.get("stop_ids", [])),
    )


def by_transformers(
    logits: Tensor, wanted: dict[str, Any], history: list[int], num_prompt: int
) -> Tensor:
    """Apply the processors of transformers to logits [vocab_size]."""
    processors = LogitsProcessorList()
    if wanted.get("bias"):
        bias = [[[token_id], float(value)] for token_id, value in wanted["bias"].items()]
        processors.append(SequenceBiasLogitsProcessor(bias))  # type: ignore[arg-type]
    if "repetition_penalty" in wanted:
        processors.append(RepetitionPenaltyLogitsProcessor(wanted["repetition_penalty"]))
    frequency, presence = wanted.get("frequency_penalty", 0.0), wanted.get("presence_penalty", 0.0)
    processors.append(GeneratedPenalties(num_prompt, frequency, presence))
    if wanted.get("bad_words"):
        processors.append(NoBadWordsLogitsProcessor(wanted["bad_words"], eos_token_id=None))
    if wanted.get("min_new_tokens") and wanted.get("stop_ids"):
        processors.append(
            MinNewTokensLengthLogitsProcessor(
                num_prompt, wanted["min_new_tokens"], wanted["stop_ids"]
            )
        )
    if "allowed" in wanted:
        others = sorted(set(range(VOCAB)) - set(wanted["allowed"]))
        if others:
            processors.append(SuppressTokensLogitsProcessor(others))
    return processors(torch.tensor([history]), logits[None].clone())[0]  # type: ignore[arg-type]


def table_of(histories: list[list[int]], seed: int) -> Tensor:
    """Make a table [slots, context] of known tokens, followed by those of earlier requests."""
    tokens = torch.randint(0, 7, (len(histories), CONTEXT), generator=generator(seed))
    for slot, history in enumerate(histories):
        tokens[slot, : len(history)] = torch.tensor(history)
    return tokens.int()


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def applied(
    logits: Tensor, known: list[list[int]], rules: list[SlotSamplingParams], seed: int = 0
) -> Tensor:
    rows = [RowLogits(i, i, SlotLogits(params, CPU)) for i, params in enumerate(rules)]
    return apply_logits_processors(
        logits, rows, np.array([len(h) for h in known]), table_of(known, seed)
    )


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(asked, histories, st.integers(1, 30)), min_size=1, max_size=5),
    st.integers(0, 1000),
)
def test_rows_come_out_as_transformers_processors_leave_them(
    cases: list[tuple[dict[str, Any], list[int], int]], seed: int
) -> None:
    logits = torch.randn(len(cases), VOCAB, generator=generator(seed)) * 4
    before = logits.clone()
    known = [history for _, history, _ in cases]
    prompts = [min(prompt, len(history)) for _, history, prompt in cases]
    rules = [rules_of(case[0], prompt) for case, prompt in zip(cases, prompts, strict=True)]
    got = applied(logits, known, rules, seed)
    assert logits.equal(before), "the model's own logits are changed"
    for row, (wanted, history, _) in enumerate(cases):
        expected = by_transformers(logits[row], wanted, history, prompts[row])
        torch.testing.assert_close(got[row], expected, rtol=1e-6, atol=1e-5)
        alone = applied(logits[row : row + 1], [history], [rules[row]], seed + 1)
        assert alone[0].equal(got[row]), "a row depends on other rows"


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([0.3, 1.0, 2.0]),
    st.sampled_from([0, 1, 5, 30]),
    st.sampled_from([1.0, 0.9, 0.3]),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    st.integers(0, 1000),
)
def test_the_filters_keep_what_transformers_warpers_keep(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    logits = torch.randn(3, VOCAB, generator=generator(seed)) * 3
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    expected = warpers(torch.zeros(3, 1, dtype=torch.long), logits.clone()).isfinite()  # type: ignore[arg-type]
    rows = SamplingRows(
        greedy=torch.zeros(3, dtype=torch.bool),
        temperature=torch.full((3,), temperature),
        top_k=torch.full((3,), top_k),
        top_p=torch.full((3,), top_p),
        seed=torch.zeros(3, dtype=torch.int64),
        position=torch.zeros(3, dtype=torch.int64),
        min_p=torch.full((3,), min_p),
    )
    scores = logits / temperature
    least = _threshold(scores, rows)
    kept = torch.ones_like(expected) if least is None else scores >= least.unsqueeze(1)
    assert kept.equal(expected)


def test_rows_without_rules_stay_exactly_as_they_are() -> None:
    logits = torch.randn(3, VOCAB, generator=generator(1)).bfloat16()
    rules = SlotLogits(rules_of({"repetition_penalty": 1.5, "allowed": [3]}, 2), CPU)
    got = apply_logits_processors(
        logits, [RowLogits(1, 0, rules)], np.array([9, 2, 9]), table_of([[5, 6]], 0)
    )
    assert got[0].equal(logits[0].float())
    assert got[2].equal(logits[2].float())
    assert got[1].isfinite().sum() == 1


@pytest.mark.parametrize("seed", range(3))
def test_bad_words_are_barred_also_where_they_are_longer_than_what_is_known(seed: int) -> None:
    draw = random.Random(seed)
    words = [[draw.randrange(VOCAB) for _ in range(length)] for length in (1, 2, 9, 31)]
    rules = rules_of({"bad_words": words}, 1)
    got = applied(torch.zeros(1, VOCAB), [[words[1][0]]], [rules])
    barred = set(torch.nonzero(got[0] == float("-inf")).flatten().tolist())
    assert barred == {words[0][0], words[1][1]}


def test_packed_lists_are_what_they_were() -> None:
    values = array("f", [1.5, -2.25])
    assert pack_floats(values) == np.array(values, dtype="<f4").tobytes()
