"""Prompt logprobs are computed in chunks, beside rows that are greedy."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from quadriga.wire.packing import pack_ids, unpack_ids
from quadriga.wire.worker import (
    EXTEND,
    MIXED,
    NewSlot,
    SlotSamplingParams,
    StepPlan,
    StepResult,
    WantedLogprobs,
)
from tests.unit.worker_driver import prompts_of, runner_of

WITH_LOGPROBS, PLAIN = 3, 5
NO_IDS = pack_ids([])


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_a_chunked_prompt_gets_its_logprobs_beside_plain_rows(
    kernels: str, llama_dir: Path
) -> None:
    runner = runner_of(llama_dir, attention_backend=kernels)
    prompt, plain = prompts_of([11, 3])
    rules = SlotSamplingParams(num_prompt=len(prompt), prompt_logprobs=2)
    new = [
        NewSlot(WITH_LOGPROBS, pack_ids(prompt), 0, pack_ids([4, 7, 2]), 0.0, -1, 1.0, 0, rules),
        NewSlot(PLAIN, pack_ids(plain), 0, pack_ids([9, 1]), 0.0, -1, 1.0, 0),
    ]
    slots = pack_ids([WITH_LOGPROBS, PLAIN])
    results: list[StepResult] = [
        runner.run(StepPlan(0, EXTEND, slots, pack_ids([5, 3]), new, NO_IDS)),
        runner.run(StepPlan(1, MIXED, slots, pack_ids([5, 1]), [], NO_IDS)),
        runner.run(StepPlan(2, MIXED, slots, pack_ids([1, 1]), [], NO_IDS)),
    ]
    model = AutoModelForCausalLM.from_pretrained(llama_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    pieces = [piece for result in results for piece in result.prompt_logprobs]
    assert [piece.row for piece in pieces] == [0, 0]
    values = np.concatenate([np.frombuffer(p.block.values, "<f4") for p in pieces])
    top_ids = [i for p in pieces for i in unpack_ids(p.block.top_ids)]
    np.testing.assert_allclose(
        values, expected.gather(1, torch.tensor(prompt)[1:, None])[:, 0], atol=1e-3
    )
    assert top_ids == expected.topk(2).indices.flatten().tolist()


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_chosen_ids_come_after_the_likeliest_ones_and_change_no_other_row(
    kernels: str, llama_dir: Path
) -> None:
    runner = runner_of(llama_dir, attention_backend=kernels)
    prompt = prompts_of([6])[0]
    wanted: list[int | WantedLogprobs] = [
        WantedLogprobs(2, pack_ids([7, 300, 7])),
        WantedLogprobs(0, pack_ids([9])),
        1,
    ]
    new = [
        NewSlot(
            slot, pack_ids(prompt), 0, pack_ids([2 * slot, 2 * slot + 1]), 0.0, -1, 1.0, 0,
            SlotSamplingParams(num_prompt=len(prompt), logprobs=logprobs),
        )
        for slot, logprobs in enumerate(wanted)
    ]  # fmt: skip
    plan = StepPlan(0, EXTEND, pack_ids([0, 1, 2]), pack_ids([6, 6, 6]), new, NO_IDS)
    sampled = runner.run(plan).logprobs
    assert sampled is not None
    model = AutoModelForCausalLM.from_pretrained(llama_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    first, second = expected.topk(2).indices.tolist()
    ids = np.frombuffer(sampled.block.top_ids, "<i4").reshape(3, -1)
    values = np.frombuffer(sampled.block.top_values, "<f4").reshape(3, -1)
    rows = {row: place for place, row in enumerate(unpack_ids(sampled.rows))}
    listed = [[first, second, 7, 300, 7], [9], [first]]
    for row, token_ids in enumerate(listed):
        place = rows[row]
        assert ids[place].tolist() == token_ids + [-1] * (5 - len(token_ids))
        np.testing.assert_allclose(values[place, : len(token_ids)], expected[token_ids], atol=1e-3)
        assert np.isnan(values[place, len(token_ids) :]).all()
