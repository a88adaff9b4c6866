"""Memory at the start: whether the weights fit, what a step takes, and the size of the KV pool.

A worker that takes the place of one that died finds in the run directory what the first one took:
it waits until a GPU has that much memory again, and makes a pool of the same size.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import nn

from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import (
    CUDA_FRACTION,
    OTHER_FRACTION,
    SchedulerArgs,
    WorkerArgs,
)
from quadriga.wire.packing import pack_ids
from quadriga.wire.worker import SlotSamplingParams, StepPlan
from worker_proc.models.attention import AttentionShape
from worker_proc.startup.devices import free_memory
from worker_proc.step.dummy_plans import prefill_plan

MIB = 2**20
# A killed process's memory on a GPU comes back within a second or so, that of its ranks a little
# later.
MEMORY_WAIT_S = 30.0
MEMORY_POLL_S = 0.1


class FirstStart(msgspec.Struct, frozen=True):
    """What the first worker of a run took.

    Attributes:
        used_bytes: memory of the device, without what it captured and measured later.
        num_pages: of its KV pool.
        prefill_tokens: measured size of a prefill; 0: it was not measured.
    """

    used_bytes: int
    num_pages: int
    prefill_tokens: int = 0

    @staticmethod
    def path(run_dir: Path, rank: int) -> Path:
        """Return the file of a rank's record."""
        return run_dir / f"first-start-{rank}.json"

    @staticmethod
    def read(path: Path | None) -> "FirstStart | None":
        """Return the record of a file; None if this is the first start."""
        if path is None or not path.exists():
            return None
        return msgspec.json.decode(path.read_bytes(), type=FirstStart)

    def write(self, path: Path) -> None:
        """Keep the record for the workers that take the place of this one."""
        unfinished = path.with_suffix(".tmp")
        unfinished.write_bytes(msgspec.json.encode(self))
        unfinished.replace(path)


def wait_for_memory(device: torch.device, needed_bytes: int) -> None:
    """Wait until so much memory is free, at most MEMORY_WAIT_S, as a dead worker's may come back.

    Whether what is free then suffices is left to `check_weights` and `num_pool_pages`.
    """
    give_up_at = time.monotonic() + MEMORY_WAIT_S
    while free_memory(device) < needed_bytes:
        if time.monotonic() >= give_up_at:
            logging.warning(
                "%d MiB are free on %s, and the worker before took %d MiB: another process has"
                " the rest",
                free_memory(device) // MIB, device, needed_bytes // MIB,
            )  # fmt: skip
            return
        time.sleep(MEMORY_POLL_S)


def dense_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """Return the bytes of a model's weights in one dtype; the model needs no storage."""
    return sum(weight.numel() * dtype.itemsize for weight in model.parameters())


def check_weights(
    needed: int,
    dtype: torch.dtype,
    free_bytes: int,
    device: torch.device,
    stored: str = "",
    kept: str = "",
) -> None:
    """Raise ConfigError if the weights of a model exceed the free memory.

    Args:
        needed: bytes of the weights.
        dtype: of the weights that are not in fewer bits.
        free_bytes: memory of the device.
        device: where they are to be.
        stored: how the files keep the weights, if in fewer bits than the device will.
        kept: how the device keeps weights in fewer bits, if it does.
    """
    if needed <= free_bytes:
        return
    as_dtype = kept or str(dtype).removeprefix("torch.")
    remedies = ["take a smaller model", "more GPUs with --tp"]
    if dtype == torch.float32:
        remedies.insert(1, "half the bytes with --dtype bfloat16")
    if stored:
        as_dtype += f" (the log says why they do not stay as {stored})"
        remedies.append("--device cpu, which keeps them as they are")
    raise ConfigError(
        f"the model's weights take {needed / MIB:.0f} MiB in {as_dtype}, but {device} has"
        f" {free_bytes / MIB:.0f} MiB free; {', '.join(remedies[:-1])}, or {remedies[-1]}"
    )


def largest_step(
    args: SchedulerArgs, default_chunk: int, context_length: int, page_size: int
) -> StepPlan:
    """Return a prefill plan with as many tokens and rows as a step may have, all of them drawn.

    A step may hold more prompt tokens than the budget if they are the last ones (`prefill_slack`),
    and a token of each running request beside them. Every row asks for what copies its logits in
    float32, the first one for the logprobs of its prompt, too.

    Args:
        args: limits of a step.
        default_chunk: prompt tokens of a step if the flags leave the number open.
        context_length: the longest possible prompt, in tokens.
        page_size: tokens of a page.
    """
    num_tokens = args.prefill_budget(default_chunk) + args.prefill_slack(default_chunk)
    num_tokens += args.max_batch_size
    plan = rows_of(num_tokens, args, context_length, page_size)
    rules = SlotSamplingParams(
        num_prompt=len(plan.new[0].token_ids) // 4,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        allowed_ids=pack_ids([0]),
        logprobs=1,
    )
    with_rules = [msgspec.structs.replace(one, rules=rules) for one in plan.new]
    of_prompt = msgspec.structs.replace(rules, prompt_logprobs=1)
    with_rules[0] = msgspec.structs.replace(with_rules[0], rules=of_prompt)
    return msgspec.structs.replace(plan, new=with_rules)


def rows_of(num_tokens: int, args: SchedulerArgs, context_length: int, page_size: int) -> StepPlan:
    """Return a prefill plan of about so many tokens, in as many rows as a step may have."""
    num_rows = min(args.max_batch_size + args.prefill_width, args.max_running_requests, num_tokens)
    row_tokens = max(1, min(num_tokens // num_rows, context_length - 1))
    return prefill_plan(row_tokens, page_size, num_rows, temperature=1.0, top_p=0.9)


def num_plan_pages(plan: StepPlan) -> int:
    """Return the number of pages that a plan needs from an empty pool."""
    return sum(len(slot.pages) // 4 for slot in plan.new)


def peak_gpu_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Return the peak of the GPU memory that `run()` allocates, in bytes."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before


def num_pool_pages(
    args: WorkerArgs,
    shape: AttentionShape,
    kv_dtype: torch.dtype,
    device: torch.device,
    max_tokens: int,
    step_bytes: int = 0,
    num_replicas: int = 1,
    first: FirstStart | None = None,
) -> int:
    """Return the number of pages of the KV pool.

    A restart has the pool of the first start, since requests run that need it, if memory allows.

    Args:
        args: the worker's flags.
        shape: the model's attention.
        kv_dtype: of keys and values.
        device: where the pool is allocated.
        max_tokens: tokens of all slots together; a larger pool is of no use.
        step_bytes: free memory that steps need.
        num_replicas: servers that share the memory, unless each has GPUs of its own.
        first: what the worker took that this one takes the place of.

    Raises:
        ConfigError: the memory does not hold one page.
    """
    if args.max_total_tokens is not None:
        return args.max_total_tokens // args.page_size
    page_bytes = shape.bytes_per_token(kv_dtype) * args.page_size
    fraction = args.mem_fraction_static
    if fraction is None:
        fraction = CUDA_FRACTION if device.type == "cuda" else OTHER_FRACTION
    if device.type != "cuda":
        fraction /= num_replicas
    free_bytes = free_memory(device)
    if first is not None and first.num_pages * page_bytes <= free_bytes - step_bytes:
        return first.num_pages
    pool_bytes = int((free_bytes - step_bytes) * fraction)
    num_pages = min(pool_bytes // page_bytes, -(-max_tokens // args.page_size))
    if num_pages < 1:
        for_steps = f" less {step_bytes / MIB:.0f} MiB for a step" if step_bytes else ""
        raise ConfigError(
            f"mem_fraction_static is {fraction}: of {free_bytes / MIB:.0f} MiB free"
            f" memory{for_steps} that does not hold one page of {page_bytes / MIB:.1f} MiB; raise"
            " it, or lower --page-size" + (" or --chunked-prefill-size" if step_bytes else "")
        )
    if first is not None:
        logging.warning(
            "the KV pool has %d pages after this restart, and had %d: memory is missing",
            num_pages, first.num_pages,
        )  # fmt: skip
    return num_pages
