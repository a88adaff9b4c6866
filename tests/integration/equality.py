"""Greedy tokens of a whole server beside those of transformers, in many ways to compose steps."""

import argparse
import asyncio
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from quadriga.client import AsyncClient, SamplingParams
from quadriga.server.config import server_config
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.models.resolve import resolve_model
from quadriga.wire.sockets import encode
from quadriga.wire.to_scheduler import SchedulerMessage
from quadriga.wire.worker import ResultMessage, StepPlan, StepResult
from tests import EVERYTHING
from tests.faults.inject import fault_environment, retract_one
from tests.references import greedy_of
from tests.server import running_server, settle
from tests.unit.simulation import SimulatedWorker, World, abort, submit
from worker_proc.startup.build import make_runner
from worker_proc.startup.drafts import prepare_drafts
from worker_proc.step.runner import Runner

NEW_TOKENS = 12
NUM_PROMPTS = 32
GREEDY = SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)


def lengths_up_to(most: int, num: int = NUM_PROMPTS) -> list[int]:
    """Return so many lengths: 1, 2, ..., most, denser where they are small."""
    steps = num - 1
    spread = {max(1, round(most ** (i / steps))) for i in range(num)} | {2, 3}
    return ([*sorted(spread), most] * num)[-num:]


def prompts_of(lengths: list[int], vocab_size: int) -> list[list[int]]:
    chosen = random.Random(5)
    return [[chosen.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


async def serve_all(
    endpoint: str,
    prompts: list[list[int]],
    num_tokens: int = NEW_TOKENS,
    curve_dir: Path | None = None,
) -> list[list[int]]:
    """Every prompt at once in random order, with as many requests between them that are aborted."""
    greedy = SamplingParams(temperature=0, max_new_tokens=num_tokens, ignore_eos=True)
    order = list(range(len(prompts)))
    chosen = random.Random(6)
    chosen.shuffle(order)
    async with AsyncClient(endpoint, curve_dir=curve_dir) as client:
        handles, doomed = {}, []
        for index in order:
            handles[index] = client.submit(prompts[index], greedy)
            doomed.append(client.submit(prompts[chosen.randrange(len(prompts))], greedy))
        for number, handle in enumerate(doomed):
            await asyncio.sleep(0.002 * (number % 3))
            handle.abort()
        completions = [await handles[index].completion() for index in range(len(prompts))]
    return [completion.token_ids for completion in completions]


WAYS = {
    "default": [],
    "narrow": ["--max-batch-size", "3", "--prefill-max-batch-size", "5"],
    "chunks of 1, mixed": ["--chunked-prefill-size", "1"],
    "chunks of 7, prefill first": [
        "--chunked-prefill-size", "7", "--batch-mode", "prefill-first", "--max-batch-size", "4",
    ],
    "chunks of 64, decode first": ["--chunked-prefill-size", "64", "--decode-first"],
    "chunks of 512, alternate": ["--chunked-prefill-size", "512", "--batch-mode", "alternate"],
    "whole prompts, mixed, no cache": ["--chunked-prefill-size", "-1", "--disable-radix-cache"],
    "retracted at random": ["--chunked-prefill-size", "64"],
    "retracted, no cache": ["--no-prefix-cache"],
    "static": ["--batching", "static", "--max-batch-size", "6"],
    "speculated": ["--speculative-method", "ngram", "--num-speculative-tokens", "5"],
    "drafted": ["--speculative-method", "self"],
    "longest prefix first": ["--schedule-policy", "lpm", "--fair-clients"],
}  # fmt: skip
RETRACTION = fault_environment("retract:scheduler:every=5")


def check(
    model: Any,
    prompts: list[list[int]],
    log: Path,
    way: str,
    *flags: str,
    num_tokens: int = NEW_TOKENS,
) -> None:
    """Check the tokens of a whole server.

    Args:
        model: a model of transformers.
        prompts: token ids.
        log: file for the server's log.
        way: one of WAYS.
        flags: further flags of the server.
        num_tokens: number of tokens to generate for each prompt.
    """
    expected = references(model, prompts, num_tokens)
    environment = RETRACTION if way.startswith("retracted") else {}
    flags = (*flags, *WAYS[way], "--dtype", "float32")
    with running_server(log, *flags, environment=environment) as server:
        for _ in range(2):
            got = asyncio.run(serve_all(server.endpoint, prompts, num_tokens))
            info = settle(server.endpoint, 60)
            _compare(prompts, expected, got)
    _check_info(info, way, flags)


def check_in_process(
    model: Any, prompts: list[list[int]], directory: Path, way: str, *flags: str
) -> None:
    """Check the tokens of a scheduler and a worker in this process, which exchange their messages.

    The arguments are those of `check`, but for the directory of the model.
    """
    expected = references(model, prompts, NEW_TOKENS)
    flags = (*flags, "--model", str(directory), *WAYS[way], "--dtype", "float32")
    world = ComputingWorld(parse(list(flags)), retracts=way.startswith("retracted"))
    for _ in range(2):
        _compare(prompts, expected, world.serve_all(prompts))
    _check_info(world.scheduler.info(), way, flags)


def _compare(prompts: list[list[int]], expected: list[list[int]], got: list[list[int]]) -> None:
    wrong = [len(p) for p, e, g in zip(prompts, expected, got, strict=True) if e != g]
    assert not wrong, f"{len(wrong)} of {len(prompts)} differ; prompt lengths {wrong}"


def _check_info(info: Mapping[str, Any], way: str, flags: Sequence[str]) -> None:
    if way == "speculated":  # so small a model is seldom worth a draft
        assert info["spec_decode_num_accepted_tokens_total"] > 0
    if "--max-total-tokens" not in flags:  # in a small pool both are left to chance
        assert (info["cached_tokens_total"] > 0) == info["prefix_cache"]
        assert (info["retractions"] > 0) == way.startswith("retracted")


def parse(argv: list[str]) -> ServerConfig:
    parser = argparse.ArgumentParser(exit_on_error=False)
    server_config.add_flags(parser)
    config = server_config.from_namespace(parser.parse_args(argv))
    config.validate()
    return config


class ComputingWorker(SimulatedWorker):
    """A worker in simulated time that computes with a runner, to which plans go as bytes."""

    def __init__(self, page_size: int, window: int) -> None:
        super().__init__(page_size, window)
        self.runner: Runner | None = None

    def run_one(self) -> StepResult | None:
        done_at = self.done_at
        if done_at is None or self.runner is None:
            return None
        plan = msgspec.msgpack.decode(encode(self.plans.popleft()[1]), type=StepPlan)
        self.now = self.free_at = done_at
        return msgspec.msgpack.decode(encode(self.runner.run(plan)), type=StepResult)


class ComputingWorld(World):
    """A scheduler and a worker that computes.

    Args:
        config: the flags of a server.
        retracts: retract a request at every fifth result of the worker.
    """

    worker_class = ComputingWorker

    def __init__(self, config: ServerConfig, retracts: bool) -> None:
        runner = make_runner(config, resolve_model(config.model))
        can_guess = prepare_drafts(runner, config, 1) is not None
        table = runner.table
        self._retracts, self._num_results = retracts, 0
        self._chosen, self._num_served = random.Random(6), 0
        super().__init__(
            config.scheduler, table.num_pages, table.page_size,
            window=runner.window, can_guess=can_guess,
        )  # fmt: skip
        assert isinstance(self.worker, ComputingWorker)
        self.worker.runner = runner
        self.checked = False  # a pool of the usual size takes long to check at every step

    def schedule(
        self, messages: Iterable[SchedulerMessage] = (), results: Iterable[ResultMessage] = ()
    ) -> None:
        results = list(results)
        for _ in results:
            self._num_results += 1
            if self._retracts and self._num_results % 5 == 0:
                retract_one(self.scheduler, self._num_results // 5)
        super().schedule(messages, results)

    def serve_all(self, prompts: list[list[int]]) -> list[list[int]]:
        """Serve as `serve_all` does over a server: with as many requests that are aborted."""
        self._num_served += 1
        order = list(range(len(prompts)))
        self._chosen.shuffle(order)
        names = [f"{self._num_served} {index}" for index in range(len(prompts))]
        for index in order:
            doomed = prompts[self._chosen.randrange(len(prompts))]
            self._submit(names[index], prompts[index])
            self._submit(f"doomed {names[index]}", doomed)
        for index in order:
            self.send(abort(f"doomed {names[index]}"))
            for _ in range(self._chosen.randrange(2)):
                self.step()
        self.run()
        self.scheduler.check()
        return [self.detok.tokens[name] for name in names]

    def _submit(self, name: str, prompt: list[int]) -> None:
        params = msgspec.structs.replace(GREEDY, seed=0)
        self.send(msgspec.structs.replace(submit(name, prompt), params=params))


_references: dict[str, list[list[int]]] = {}


def references(
    model: Any, prompts: list[list[int]], num_tokens: int = NEW_TOKENS
) -> list[list[int]]:
    """Return the tokens after each prompt alone, computed once for each model."""
    key = f"{model.config.model_type} {model.num_parameters()} {num_tokens} {prompts}"
    if key not in _references:
        _references[key] = greedy_of(model, prompts, num_tokens)
    return _references[key]


def ways(*quick: str) -> list[str]:
    return list(WAYS) if EVERYTHING else list(quick)


async def generate(endpoint: str, prompts: list[list[int]]) -> list[list[int]]:
    async with AsyncClient(endpoint) as client:
        handles = [client.submit(prompt, GREEDY) for prompt in prompts]
        return [(await handle.completion()).token_ids for handle in handles]
