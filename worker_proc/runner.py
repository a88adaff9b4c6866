"""Runs the steps that the scheduler plans."""

import time

import numpy as np
import torch
from torch import Tensor

from quadriga.config import ServerConfig
from quadriga.messages.ids import pack_ids
from quadriga.messages.logprobs import PromptPiece, SampledLogprobs
from quadriga.messages.worker import DECODE, EXTEND, FailedRow, NewSlot, StepPlan, StepResult
from quadriga.model_source import ModelFiles
from worker_proc.choice import Chosen, choose
from worker_proc.engine import Engine
from worker_proc.engines import make_engine
from worker_proc.grammars import advance
from worker_proc.hardware import choose_device, choose_dtype, give_back_freed_memory
from worker_proc.inputs import StepInputs, ints_of, make_inputs
from worker_proc.kv_pool import SlotTable, pages_of_pool
from worker_proc.loader import load_model
from worker_proc.logprobs import tell_prompts


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
        sampling, slots = self.table.sampling, inputs.sampled_slots
        chosen: Chosen | None = None
        if len(slots) and sampling.plain[slots].all():
            hidden, likeliest = self.engine.forward_and_choose(inputs)
            chosen = Chosen(likeliest)
        else:
            hidden = self.engine.forward(inputs)
            if len(slots):
                logits = self._logits(inputs, hidden)
                chosen = choose(self.engine, logits, inputs, self.table)
        self.table.computed[inputs.rows.slots] += inputs.rows.num_tokens
        token_ids = np.full(len(inputs.rows.slots), -1, dtype="<i4")
        logprobs: SampledLogprobs | None = None
        failed: list[FailedRow] = []
        if chosen is not None:
            self._note(inputs, chosen.token_ids)
            on_host = chosen.token_ids.cpu().numpy()
            token_ids[inputs.sampled_rows] = on_host
            logprobs = chosen.logprobs
            if chosen.constrained:
                failed = advance(chosen.constrained, on_host, inputs.sampled_rows)
        prompts = self._tell_prompts(inputs, hidden) if sampling.prompts_to_tell else []
        ids = token_ids.tobytes()
        return StepResult(plan.step, ids, began, time.time(), logprobs, prompts, failed)

    def _logits(self, inputs: StepInputs, hidden: Tensor) -> Tensor:
        """Of the rows that sample."""
        last = inputs.last_tokens
        return self.engine.logits(hidden if last is None else hidden.index_select(0, last))

    def _note(self, inputs: StepInputs, token_ids: Tensor) -> None:
        """Add what was chosen to what is known of its slots."""
        table, slots = self.table, inputs.sampled_slots
        slots_there, positions = table.to_device(slots), table.to_device(inputs.sample_positions)
        table.tokens[slots_there, positions] = token_ids.to(table.tokens.dtype)
        table.known[slots] += 1

    def _tell_prompts(self, inputs: StepInputs, hidden: Tensor) -> list[PromptPiece]:
        return tell_prompts(inputs.rows, inputs.plan_rows, hidden, self.engine.logits, self.table)

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
    model = load_model(files, dtype, device, packed=args.quantization == "gguf")
    shape = model.attention_shape
    slots, context = config.scheduler.max_running_requests, files.context_length
    kept = torch.int8 if args.kv_cache_dtype == "int8" else dtype
    pages = pages_of_pool(args, shape, kept, device, slots * context)
    engine = make_engine(args, model, pages, dtype, device)
    give_back_freed_memory()
    return Runner(engine, SlotTable(slots, context, pages, args.page_size, device), dtype)
