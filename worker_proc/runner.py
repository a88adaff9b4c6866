"""Runs the steps that the scheduler plans."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from quadriga.config.server_config import ServerConfig
from quadriga.model_files.resolve import ModelFiles
from quadriga.wire.messages.arrays import pack_ids
from quadriga.wire.messages.logprobs import PromptPiece, SampledLogprobs
from quadriga.wire.messages.worker import DECODE, EXTEND, FailedRow, NewSlot, StepPlan, StepResult
from worker_proc.engine_factory import kept_as, make_engine, native_kernels_compute
from worker_proc.jump_forward import jump
from worker_proc.loading.loader import load_model
from worker_proc.loading.sharding import WHOLE, TPRank
from worker_proc.models.registry import build_model
from worker_proc.sample_step import SampledTokens, choose
from worker_proc.sampling.grammar_mask import advance
from worker_proc.startup.memory_profile import check_weights, largest_step, pages_of, peak_gpu_bytes
from worker_proc.startup.nvtx import mark_steps
from worker_proc.startup.prefill_tuning import ON_A_GPU
from worker_proc.step.engine_base import Engine
from worker_proc.step.inputs import StepInputs, ints_of, make_inputs
from worker_proc.step.logprobs import tell_prompts, untold_prompts
from worker_proc.step.slot_table import SlotTable, pages_of_pool
from worker_proc.system.devices import (
    choose_device,
    choose_dtype,
    free_memory,
    trim_heap,
)
from worker_proc.system.step_clock import Times, step_clock
from worker_proc.system.transfer import DeviceToHostCopier, Fetch

if TYPE_CHECKING:
    from worker_proc.distributed.tp_group import TPGroup

Finish = Callable[[], StepResult]
"""Waits for the end of a step that was launched."""


class Runner:
    """An engine and its slots. One `run` at a time."""

    def __init__(self, engine: Engine, table: SlotTable, dtype: torch.dtype) -> None:
        self.engine = engine
        self.table = table
        self.dtype = dtype
        self._landing = DeviceToHostCopier(table.device)
        self._start_clock = step_clock(table.device)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step. ValueError where the plan contradicts what is kept of the slots."""
        return self.launch(plan)()

    def launch(self, plan: StepPlan) -> Finish:
        """Begin a step. What is returned waits for its end, in whatever thread; on a card the next
        step may be launched before. To be called in torch's inference mode, which takes too long
        to enter for every step. ValueError as `run`."""
        clock = self._start_clock()
        if plan.released:
            self.table.release(ints_of(plan.released).tolist())
        self.table.admit(plan.new)
        if plan.grown:
            self.table.grow(*ints_of(plan.grown).reshape(-1, 2).T)
        if not plan.slots:
            return _decoded(plan, b"", clock.stop())
        decoded = self.engine.decode(plan, self.table) if plan.forward_mode == DECODE else None
        if decoded is not None:
            return _decoded(plan, decoded, clock.stop())
        inputs = make_inputs(plan, self.table)
        chosen, prompts = self._compute(inputs)
        self.table.computed[inputs.rows.slots] = inputs.reached
        fetch: Fetch | None = None
        if chosen is not None:
            self.engine.note(inputs, chosen.token_ids)
            fetch = self._landing.begin(chosen.token_ids)
        finish = _finish(plan, inputs, chosen, fetch, prompts, clock.stop())
        if chosen is not None and chosen.constrained:
            result = finish()  # the grammar has to take the token before the next one is chosen
            if self.engine.jumps and (forced := jump(chosen, inputs)):
                result = msgspec.structs.replace(result, forced=forced)
            return lambda: result
        return finish

    def _compute(self, inputs: StepInputs) -> tuple[SampledTokens | None, list[PromptPiece]]:
        """What was chosen for the rows that sample, and what was asked about prompts."""
        sampling, slots, engine = self.table.sampling, inputs.sampled_slots, self.engine
        pieces: list[PromptPiece] = []
        if untold := untold_prompts(inputs.rows, self.table):
            hidden = engine.forward(inputs)
            pieces = tell_prompts(untold, inputs.plan_rows, hidden, engine.logits)
            hidden = inputs.of_samples(hidden)
        elif len(slots) and sampling.greedy_only[slots].all():
            return SampledTokens(engine.forward_argmax(inputs)), pieces
        elif len(slots) and sampling.unfiltered[slots].all():
            return SampledTokens(engine.forward_sample(inputs)), pieces
        else:
            hidden = engine.forward_sampled(inputs)
        if not len(slots):
            return None, pieces
        return choose(engine, engine.logits(hidden), inputs, self.table), pieces

    def warm_up(self) -> None:
        """One short extend and, where there is room for it, one decode, which leave nothing
        behind."""
        table = self.table
        count = min(table.page_size, max(table.context_length - 1, 1), 8)
        slot = page = pack_ids([0])
        new = NewSlot(0, pack_ids([0] * count), 0, page, 0.0, -1, 1.0, 0)
        self.run(StepPlan(-1, EXTEND, slot, pack_ids([count]), [new], b""))
        if count < min(table.num_pages * table.page_size, table.context_length):
            grown = pack_ids([0, 1]) if count == table.page_size else b""
            self.run(StepPlan(-1, DECODE, slot, pack_ids([1]), [], b"", grown))
        self.run(StepPlan(-1, DECODE, b"", b"", [], slot))
        self.engine.prepare(table)


def _decoded(plan: StepPlan, token_ids: bytes, times: Times) -> Finish:
    """What a step gave of which there is no more to tell."""

    def finish() -> StepResult:
        began, ended = times()
        return StepResult(plan.step, token_ids, began, ended, session=plan.session)

    return finish


def _finish(
    plan: StepPlan,
    inputs: StepInputs,
    chosen: SampledTokens | None,
    fetch: Fetch | None,
    prompts: list[PromptPiece],
    times: Times,
) -> Finish:
    def finish() -> StepResult:
        token_ids = np.empty(len(inputs.rows.slots), dtype="<i4")
        token_ids.fill(-1)
        failed: list[FailedRow] = []
        logprobs: SampledLogprobs | None = None
        if chosen is not None and fetch is not None:
            on_host = fetch()
            token_ids[inputs.sampled_rows] = on_host
            logprobs = chosen.logprobs
            if chosen.constrained:
                failed = advance(chosen.constrained, on_host, inputs.sampled_rows)
        began, ended = times()
        ids = token_ids.tobytes()
        return StepResult(plan.step, ids, began, ended, logprobs, prompts, failed, plan.session)

    return finish


def make_runner(
    config: ServerConfig, files: ModelFiles, part: TPRank = WHOLE, store: Path | None = None
) -> Runner:
    """Load the model, or this part of it, and give the memory that is left to the KV pool.

    store: by which all ranks find each other, where there are several. Raises ConfigError for a
    device, dtype or size that cannot work, ModelError for the model.
    """
    args = config.worker
    device = choose_device(args.device, part.rank)
    dtype = choose_dtype(args.dtype, device, native_kernels_compute(args, device))
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels and streams are of whatever is set here
    ranks = None if store is None else _join(part, store, device)
    if device.type == "cuda":
        empty = build_model(files.config, dtype, tp_size=part.count)
        check_weights(empty, dtype, free_memory(device), device)
    model = load_model(files, dtype, device, args.quantization == "gguf", part)
    slots, context = config.scheduler.max_running_requests, files.context_length

    def with_pages(pages: int) -> Runner:
        most_rows = config.scheduler.max_batch_size
        engine = make_engine(args, model, pages, dtype, device, most_rows, ranks)
        return Runner(engine, SlotTable(slots, context, pages, args.page_size, device), dtype)

    set_aside = 0
    if device.type == "cuda":
        set_aside = _measure_step(config, context, with_pages)
        torch.cuda.empty_cache()
    shape, kept = model.attention_shape, kept_as(args, dtype)
    pages = pages_of_pool(args, shape, kept, device, slots * context, set_aside)
    if ranks is not None:
        pages = ranks.all_reduce_min(pages)
    runner = with_pages(pages)
    if args.enable_nvtx:
        mark_steps(runner)
    trim_heap()
    return runner


def _measure_step(config: ServerConfig, context: int, with_pages: Callable[[int], Runner]) -> int:
    """Bytes that a card needs for a step, found by running the largest one on a small pool. It is
    run twice, as the first one compiles."""
    plan = largest_step(config.scheduler, ON_A_GPU, context, config.worker.page_size)
    runner = with_pages(pages_of(plan))
    device = runner.table.device
    rows = [one.slot for one in plan.new]
    runner.run(plan)
    runner.run(StepPlan(-1, EXTEND, b"", b"", [], pack_ids(rows)))
    return peak_gpu_bytes(lambda: runner.run(plan), device)


def _join(part: TPRank, store: Path, device: torch.device) -> "TPGroup":
    from worker_proc.distributed.tp_group import (
        TPGroup,  # torch.distributed is only loaded where it is needed
    )

    return TPGroup(part, store, device)
