"""Run requests with adapters beside each other, and compare them with PEFT's unmerged models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from quadriga.server.config.engine_args import ModelArgs
from quadriga.server.models.adapters.content import read_content
from quadriga.server.models.resolve import resolve_model
from quadriga.wire.worker import SlotSamplingParams
from tests.unit.worker_driver import Driver, load_on_cpu
from worker_proc.adapters.change import Adapter
from worker_proc.adapters.places import Places
from worker_proc.adapters.reading import read_adapter
from worker_proc.loading.sharding import WHOLE, TPRank
from worker_proc.step.runner import Runner
from worker_proc.step.slot_table import NO_ADAPTER

LOGPROB_TOLERANCE = 1e-4


class Answer(NamedTuple):
    """What a request brought.

    Attributes:
        token_ids: its greedy tokens.
        logprobs: of its prompt's tokens but the first, float32.
    """

    token_ids: list[int]
    logprobs: np.ndarray


def load_adapter(model_dir: Path, adapter_dir: Path, rank: TPRank = WHOLE) -> Adapter:
    """Read an adapter for a model."""
    files = resolve_model(ModelArgs(model=str(model_dir)))
    places = Places.of(load_on_cpu(model_dir), rank)
    return read_adapter(read_content(adapter_dir), places, files)


def run_adapted(
    runner: Runner, requests: Sequence[tuple[list[int], int]], count: int, chunk: int = 9
) -> list[Answer]:
    """Run all requests beside each other, their prompts in chunks.

    Args:
        runner: its engine has the adapters.
        requests: prompts, each with the index of its adapter or NO_ADAPTER.
        count: number of tokens to generate for each of them.
        chunk: most tokens of a prompt in a step.
    """
    driver, pieces = Driver(runner), dict[int, list[np.ndarray]]()
    made = [driver.add(prompt) for prompt, _ in requests]
    for request, (prompt, index) in zip(made, requests, strict=True):
        runner.table.adapters[request.slot] = index
        driver.set_rules(request, SlotSamplingParams(num_prompt=len(prompt), prompt_logprobs=1))
        pieces[request.slot] = []
    while unfinished := [request for request in made if len(request.output) < count]:
        rows = [(request, min(request.left_of_prompt, chunk) or 1) for request in unfinished]
        result = runner.run(driver.plan(rows))
        assert not result.failed
        for request, token in zip(unfinished, np.frombuffer(result.token_ids, "<i4"), strict=True):
            request.output += [int(token)] if token >= 0 else []
        for piece in result.prompt_logprobs:
            values = np.frombuffer(piece.block.values, "<f4")
            pieces[unfinished[piece.row].slot].append(values)
    runner.table.release_all()
    return [Answer(request.output, np.concatenate(pieces[request.slot])) for request in made]


@torch.inference_mode()
def check_answer(model: Any, prompt: list[int], answer: Answer) -> None:
    """Check an answer against a model of transformers or PEFT, whose adapter is set.

    Its greedy tokens have to be the model's, and so have the logprobs of its prompt.

    Args:
        model: in float32.
        prompt: token ids of two or more tokens.
        answer: of the engine.
    """
    logits = model(torch.tensor([prompt + answer.token_ids])).logits[0, :-1].float()
    assert answer.token_ids == logits.argmax(-1)[len(prompt) - 1 :].tolist()
    tokens = torch.tensor(prompt[1:]).unsqueeze(1)
    logprobs = logits.log_softmax(-1)[: len(tokens)].gather(1, tokens)[:, 0]
    np.testing.assert_allclose(answer.logprobs, logprobs, rtol=0, atol=LOGPROB_TOLERANCE)


__all__ = ["NO_ADAPTER", "Answer", "check_answer", "load_adapter", "run_adapted"]
