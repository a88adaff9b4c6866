"""Runs the steps that the scheduler plans."""

import time

import numpy as np
import torch
from torch import Tensor

from quadriga.config import ServerConfig
from quadriga.messages.ids import pack_ids
from quadriga.messages.worker import DECODE, EXTEND, NewSlot, StepPlan, StepResult
from quadriga.model_source import ModelFiles
from worker_proc.engine import Engine
from worker_proc.engines import make_engine
from worker_proc.hardware import choose_device, choose_dtype
from worker_proc.inputs import StepInputs, ints_of, make_inputs
from worker_proc.kv_pool import SlotTable, pages_of_pool
from worker_proc.loader import load_model
from worker_proc.sampler import SamplingRows, sample


class Runner:
    """An engine and its slots. One `run` at a time."""

    def __init__(self, engine: Engine, table: SlotTable, dtype: torch.dtype) -> None:
        self.engine = engine
        self.table = table
        self.dtype = dtype

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step. ValueError where the plan contradicts what is kept of the slots."""
        began = time.time()
        self.table.release(ints_of(plan.released))
        self.table.admit(plan.new)
        self.table.grow(*ints_of(plan.grown).reshape(-1, 2).T)
        if not plan.slots:
            return StepResult(plan.step, b"", began, time.time())
        inputs = make_inputs(plan, self.table)
        hidden = self.engine.forward(inputs)
        self.table.computed[inputs.rows.slots] += inputs.rows.num_tokens
        token_ids = np.full(len(inputs.rows.slots), -1, dtype="<i4")
        if len(inputs.sampled_slots):
            sampled = self._sample(inputs, hidden)
            token_ids[inputs.sampled_rows] = sampled.cpu().numpy()
        return StepResult(plan.step, token_ids.tobytes(), began, time.time())

    def _sample(self, inputs: StepInputs, hidden: Tensor) -> Tensor:
        """Draw a token for each sampling row and add it to what is known of its slot."""
        if inputs.last_tokens is not None:
            hidden = hidden.index_select(0, inputs.last_tokens)
        table, slots = self.table, inputs.sampled_slots
        slots_there, positions = table.to_device(slots), table.to_device(inputs.sample_positions)
        rows = None
        if not table.greedy[slots].all():
            rows = SamplingRows(
                greedy=torch.from_numpy(table.greedy[slots]).to(table.device),
                temperature=table.temperature[slots_there],
                top_k=table.top_k[slots_there],
                top_p=table.top_p[slots_there],
                seed=table.seed[slots_there],
                position=positions,
            )
        sampled = (
            self.engine.likeliest(hidden)
            if rows is None
            else sample(self.engine.logits(hidden), rows)
        )
        table.tokens[slots_there, positions] = sampled.to(table.tokens.dtype)
        table.known[slots] += 1
        return sampled

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


def make_runner(config: ServerConfig, files: ModelFiles) -> Runner:
    """Load the model and give the memory that is left to the KV pool.

    Raises ConfigError for a device, dtype or size that cannot work, ModelError for the model.
    """
    args = config.worker
    device = choose_device(args.device)
    dtype = choose_dtype(args.dtype, device)
    model = load_model(files, dtype, device)
    shape = model.attention_shape
    slots, context = config.scheduler.max_running_requests, files.context_length
    pages = pages_of_pool(args, shape, dtype, device, slots * context)
    engine = make_engine(args, model, pages, dtype, device)
    return Runner(engine, SlotTable(slots, context, pages, args.page_size, device), dtype)
