"""Run requests with adapters beside each other, and compare them with PEFT's unmerged models."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from quadriga.server.config.engine_args import ModelArgs
from quadriga.server.models.adapters.content import read_content
from quadriga.server.models.resolve import ModelFiles, resolve_model
from quadriga.wire.worker import NO_ADAPTER, SlotSamplingParams
from tests.unit.worker_driver import CPU, Driver, load_on_cpu, prompts_of
from worker_proc.adapters.change import Adapter
from worker_proc.adapters.places import Places
from worker_proc.engines.torch_engine import TorchAttention, TorchEngine
from worker_proc.loading.loader import load_model
from worker_proc.loading.sharding import WHOLE, TPRank
from worker_proc.startup.adapters import read_adapter
from worker_proc.step.runner import Runner
from worker_proc.step.slot_table import SlotTable

COUNT = 64  # tokens of an answer
LOGPROB_TOLERANCE = 1e-4


class Answer(NamedTuple):
    """What a request brought.

    Attributes:
        token_ids: its greedy tokens.
        logprobs: of its prompt's tokens but the first, float32.
    """

    token_ids: list[int]
    logprobs: np.ndarray


def load_adapter(model_dir: Path, adapter: Path) -> Adapter:
    """Read an adapter for a model's directory."""
    places = Places.of(load_on_cpu(model_dir))
    return read_adapter(read_content(adapter), places, files_of(model_dir))


def torch_runner(
    files: ModelFiles,
    adapters: Sequence[Path],
    rank: TPRank = WHOLE,
    ranks: Any = None,
    dtype: torch.dtype = torch.float32,
) -> Runner:
    """Return a runner in plain torch of 16 slots, whose adapters have the indexes 0, 1, and so on.

    Args:
        files: of the model.
        adapters: their directories or files.
        rank: the part of the model.
        ranks: what adds up the parts; None: there is one.
        dtype: of the weights.
    """
    with torch.inference_mode():
        model = load_model(files, dtype, CPU, rank=rank)
        places, num_pages = Places.of(model, rank), 1024
        attention = TorchAttention(model.attention_shape, num_pages, 4, dtype, CPU)
        engine = TorchEngine(model, attention, ranks)
        for index, path in enumerate(adapters):
            engine.set_adapter(index, read_adapter(read_content(path), places, files))
    return Runner(engine, SlotTable(16, files.context_length, num_pages, 4, CPU), dtype)


class ThreadRanks:
    """The ranks of a model as threads of this process."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count, timeout=60)
        self._parts: list[torch.Tensor] = [torch.empty(0)] * count

    def of(self, rank: int) -> "ThreadRank":
        """Return the group as one rank has it."""
        return ThreadRank(self, rank)

    def sum(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the tensors of all ranks."""
        self._parts[rank] = x
        self._barrier.wait()
        total = torch.stack(self._parts).sum(0)
        self._barrier.wait()
        return total


class ThreadRank:
    """What an engine needs of a TPGroup."""

    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        self._ranks, self._rank = ranks, rank

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._ranks.sum(self._rank, x)

    def check_tokens(self, token_ids: object) -> None:
        pass


def run_on_ranks(
    files: ModelFiles,
    adapters: Sequence[Path],
    count: int,
    requests: Sequence[tuple[list[int], int]],
    num_tokens: int,
) -> list[list[Answer]]:
    """Run requests on `count` ranks, as `run_adapted` does; return the answers of each rank."""
    ranks = ThreadRanks(count)

    def run(rank: int) -> list[Answer]:
        runner = torch_runner(files, adapters, TPRank(rank, count), ranks.of(rank))
        return run_adapted(runner, requests, num_tokens)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


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
    driver, pieces, adapters = Driver(runner), dict[int, list[np.ndarray]](), dict[int, int]()
    made = [driver.add(prompt) for prompt, _ in requests]
    for request, (prompt, index) in zip(made, requests, strict=True):
        adapters[request.slot] = index
        driver.set_rules(request, SlotSamplingParams(num_prompt=len(prompt), prompt_logprobs=1))
        pieces[request.slot] = []
    runner.table.apply(driver.plan([]))  # the requests get their slots
    for slot, index in adapters.items():
        runner.table.adapters[slot] = index
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


def files_of(directory: Path) -> ModelFiles:
    """Return the files of a model's directory."""
    return resolve_model(ModelArgs(model=str(directory)))


def requests_of(num_adapters: int, lengths: Sequence[int]) -> list[tuple[list[int], int]]:
    """Return prompts, the same for each adapter and for the base."""
    indexes = [*range(num_adapters), NO_ADAPTER]
    return [(prompt, index) for index in indexes for prompt in prompts_of(lengths)]


def check_adapted(
    runner: Runner,
    directory: Path,
    adapters: Sequence[Path],
    lengths: Sequence[int] = (5, 30),
    count: int = COUNT,
    chunk: int = 9,
) -> None:
    """Check prompts of all adapters and of the base in one batch.

    Args:
        runner: its engine has the adapters, by their places in the list.
        directory: of the model, for the references.
        adapters: directories of PEFT, for the references.
        lengths: of the prompts.
        count: number of tokens to generate.
        chunk: most tokens of a prompt in a step.
    """
    requests = requests_of(len(adapters), lengths)
    answers = run_adapted(runner, requests, count, chunk)
    check_answers(directory, adapters, requests, answers)


def check_answers(
    directory: Path,
    adapters: Sequence[Path],
    requests: Sequence[tuple[list[int], int]],
    answers: Sequence[Answer],
) -> None:
    """Check answers against those of PEFT and, without an adapter, of transformers.

    All adapters have to change the answers.
    """
    from peft import PeftModel

    for index in {index for _, index in requests}:
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        if index != NO_ADAPTER:
            model = PeftModel.from_pretrained(model, str(adapters[index]))
        model.eval()
        for (prompt, of_prompt), answer in zip(requests, answers, strict=True):
            if of_prompt == index:
                check_answer(model, prompt, answer)
    by_index = {index: a.logprobs for (_, index), a in zip(requests, answers, strict=True)}
    without = by_index.pop(NO_ADAPTER, None)
    for logprobs in by_index.values() if without is not None else ():
        assert np.abs(logprobs - without).max() > 100 * LOGPROB_TOLERANCE


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
