"""Prompt logprobs are computed in chunks, beside rows that are greedy."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from quadriga.wire.messages.arrays import pack_ids, unpack_ids
from quadriga.wire.messages.worker import (
    EXTEND,
    MIXED,
    NewSlot,
    SlotSamplingParams,
    StepPlan,
    StepResult,
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
