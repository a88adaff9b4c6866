"""A driver of a Runner in place of a scheduler: keeps slots and pages, plans, collects tokens."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from quadriga.sampling.pooling import Pooling
from quadriga.server.config.engine_args import ModelArgs
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.models.resolve import resolve_model
from quadriga.wire.packing import pack_floats, pack_ids, unpack_ids
from quadriga.wire.worker import (
    DECODE,
    EXTEND,
    MIXED,
    NewSlot,
    SlotSamplingParams,
    StepPlan,
    WantedLogprobs,
)
from worker_proc.loading.loader import load_model
from worker_proc.models.attention import AttentionShape
from worker_proc.models.base import Model
from worker_proc.startup.build import make_runner
from worker_proc.step.runner import Runner

CPU = torch.device("cpu")
SHAPE = AttentionShape(layers=1, heads=1, kv_heads=1, head_dim=32)

torch.set_num_threads(1)  # nothing here is large, and threads wait for each other on a busy machine


def runner_of(directory: Path, **flags: Any) -> Runner:
    """Build a runner: float32 on the CPU, 8 slots, pages of 4 tokens, a pool of 2048 tokens."""
    defaults = {
        "device": "cpu",
        "dtype": "float32",
        "page_size": 4,
        "max_total_tokens": 2048,
        "max_running_requests": 8,
    }
    config = ServerConfig().replace(**{**defaults, **flags})
    model = ModelArgs(model=str(directory), context_length=config.model.context_length)
    return make_runner(config, resolve_model(model))


def load_on_cpu(directory: Path, dtype: torch.dtype = torch.float32) -> Model:
    """Load the model of a directory."""
    return load_model(resolve_model(ModelArgs(model=str(directory))), dtype, torch.device("cpu"))


@dataclass
class Request:
    """A request, and the tokens that the runner generated for it."""

    prompt: list[int]
    slot: int
    pages: list[int]
    num_shared_pages: int
    computed: int
    known: int
    output: list[int] = field(default_factory=list)

    @property
    def left_of_prompt(self) -> int:
        return max(0, len(self.prompt) - self.computed)


class Driver:
    """Hands out pages in random order, and as late as possible."""

    def __init__(self, runner: Runner, seed: int = 0) -> None:
        self.runner = runner
        table = runner.table
        self.free_pages = list(range(table.num_pages))
        random.Random(seed).shuffle(self.free_pages)
        self.free_slots = list(range(table.num_slots))
        random.Random(seed).shuffle(self.free_slots)
        self._new: list[NewSlot] = []
        self._grown: list[int] = []
        self._released: list[int] = []
        self._step = 0

    def add(
        self,
        prompt: Sequence[int],
        temperature: float = 0.0,
        top_k: int = -1,
        top_p: float = 1.0,
        seed: int = 0,
        like: Request | None = None,
        shared: int = 0,
    ) -> Request:
        """Take a slot, and pages for the prompt.

        Its first `shared` tokens, whole pages, are those of `like`, and count as computed.
        """
        size = self.runner.table.page_size
        pages = like.pages[: shared // size] if like else []
        request = Request(
            list(prompt), self.free_slots.pop(), pages, len(pages), shared, len(prompt)
        )
        self._take_pages(request, len(prompt))
        self._new.append(
            NewSlot(
                slot=request.slot,
                token_ids=pack_ids(prompt),
                computed=shared,
                pages=pack_ids(request.pages),
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
            )
        )
        return request

    def set_rules(self, request: Request, rules: SlotSamplingParams) -> None:
        """Give a request that no plan has yet further sampling parameters."""
        self._new = [
            msgspec.structs.replace(new, rules=rules) if new.slot == request.slot else new
            for new in self._new
        ]

    def set_adapter(self, request: Request, index: int) -> None:
        """Give a request that no plan has yet an adapter."""
        self._new = [
            msgspec.structs.replace(new, adapter=index) if new.slot == request.slot else new
            for new in self._new
        ]

    def set_pooling(self, request: Request, pooling: Pooling) -> None:
        """Let a request that no plan has yet have a vector."""
        self._new = [
            msgspec.structs.replace(new, pooling=pooling) if new.slot == request.slot else new
            for new in self._new
        ]

    def release(self, request: Request) -> None:
        """Free slot and pages, which may be used again at once."""
        self._released.append(request.slot)
        self.free_slots.append(request.slot)
        self.free_pages.extend(request.pages[request.num_shared_pages :])

    def plan(self, rows: Sequence[tuple[Request, int]]) -> StepPlan:
        """Plan a step of (request, tokens) rows."""
        counts = [count for _, count in rows]
        modes = {DECODE if request.left_of_prompt == 0 else EXTEND for request, _ in rows}
        for request, count in rows:
            for page in self._take_pages(request, request.computed + count):
                self._grown += (request.slot, page)
        plan = StepPlan(
            step=self._step,
            forward_mode=modes.pop() if len(modes) == 1 else MIXED,
            slots=pack_ids(request.slot for request, _ in rows),
            num_tokens=pack_ids(counts),
            new=self._new,
            released=pack_ids(self._released),
            grown=pack_ids(self._grown),
        )
        self._step, self._new, self._released, self._grown = self._step + 1, [], [], []
        for request, count in rows:
            request.computed += count
            request.known += request.computed == request.known
        return plan

    def step(self, *rows: tuple[Request, int]) -> list[int]:
        """Run one step of (request, tokens) rows and note what was sampled."""
        result = self.runner.run(self.plan(rows))
        tokens = list(unpack_ids(result.token_ids))
        for (request, _), token in zip(rows, tokens, strict=True):
            if token >= 0:
                request.output.append(token)
        return tokens

    def _take_pages(self, request: Request, tokens: int) -> list[int]:
        """Give the request the pages that it lacks for so many tokens, and return them."""
        lacking = -(-tokens // self.runner.table.page_size) - len(request.pages)
        taken = [self.free_pages.pop() for _ in range(lacking)]
        request.pages += taken
        return taken

    def generate(self, requests: Sequence[Request], count: int, chunk: int = 10**6) -> None:
        """Run steps until each has `count` tokens: prompts in chunks, decode rows beside them."""
        while unfinished := [r for r in requests if len(r.output) < count]:
            self.step(*((r, min(r.left_of_prompt, chunk) or 1) for r in unfinished))


def prompts_of(lengths: Sequence[int], seed: int = 0, vocab_size: int = 400) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size) for _ in range(length)] for length in lengths]


def failures_of_unknown_ids(runner: Runner) -> list[str]:
    """Run requests with ids that the model does not have beside one without, in two steps.

    Check that the other request gets the tokens that it gets alone, and that the slots can be used
    again. Return the errors of the first step's rows.
    """
    vocab_size = runner.table.vocab_size
    (prompt,) = prompts_of([9])
    driver = Driver(runner)
    alone = driver.add(prompt)
    driver.generate([alone], 3)
    driver.release(alone)
    good = driver.add(prompt)
    wrong = [driver.add(ids) for ids in ([1, vocab_size, 2], [-1, 3], [2**31 - 1], prompt)]
    unknown = pack_ids([vocab_size])
    rules = (
        SlotSamplingParams(num_prompt=9, bad_words=[pack_ids([1]), unknown]),
        SlotSamplingParams(num_prompt=9, stop_ids=unknown, min_new_tokens=2),
        SlotSamplingParams(num_prompt=9, bias_ids=unknown, bias=pack_floats([1.0])),
        SlotSamplingParams(num_prompt=9, allowed_ids=unknown),
        SlotSamplingParams(num_prompt=9, logprobs=WantedLogprobs(1, unknown)),
    )
    of_rules = [driver.add(prompt) for _ in rules[1:]]
    for new, rule in zip((wrong[-1], *of_rules), rules, strict=True):
        driver.set_rules(new, rule)
    refused = [*wrong, *of_rules]
    rows = [(request, len(request.prompt)) for request in (good, *refused)]
    errors: list[str] = []
    for step_rows in (rows, [(request, 1) for request, _ in rows]):
        result = runner.run(driver.plan(step_rows))
        assert [row.row for row in result.failed] == list(range(1, len(rows)))
        good.output.append(unpack_ids(result.token_ids)[0])
        errors = errors or [row.error for row in result.failed]
    for request in refused:
        driver.release(request)
    driver.step((good, 1))
    assert good.output == alone.output
    again = driver.add(prompt)
    driver.generate([again], 3)
    assert again.output == alone.output
    return errors


def plan_of(
    slots: bytes = b"",
    num_tokens: bytes = b"",
    new: Sequence[NewSlot] = (),
    released: bytes = b"",
    grown: bytes = b"",
) -> StepPlan:
    return StepPlan(
        step=9,
        forward_mode=DECODE,
        slots=slots,
        num_tokens=num_tokens,
        new=list(new),
        released=released,
        grown=grown,
    )
