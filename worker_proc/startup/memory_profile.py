"""Memory at the start: whether the weights fit, what a step takes, and the size of the KV pool."""

from collections.abc import Callable

import torch
from torch import nn

from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import (
    CUDA_FRACTION,
    OTHER_FRACTION,
    SchedulerArgs,
    WorkerArgs,
)
from quadriga.wire.worker import StepPlan
from worker_proc.models.attention import AttentionShape
from worker_proc.startup.devices import free_memory
from worker_proc.step.dummy_plans import prefill_plan

MIB = 2**20


def check_weights(
    model: nn.Module, dtype: torch.dtype, free_bytes: int, device: torch.device
) -> None:
    """Raise ConfigError if the weights of a model, without storage yet, exceed the free memory."""
    needed = sum(weight.numel() * dtype.itemsize for weight in model.parameters())
    if needed > free_bytes:
        raise ConfigError(
            f"the model's weights take {needed / MIB:.0f} MiB in"
            f" {str(dtype).removeprefix('torch.')}, but {device} has {free_bytes / MIB:.0f} MiB"
            " free; take a smaller model, fewer bits with --dtype, or more GPUs with --tp"
        )


def largest_step(
    args: SchedulerArgs, default_chunk: int, context_length: int, page_size: int
) -> StepPlan:
    """Return a prefill plan with as many tokens and rows as a step may have, all of them drawn.

    A step may hold more prompt tokens than the budget if they are the last ones (`prefill_slack`),
    and a token of each running request beside them.

    Args:
        args: limits of a step.
        default_chunk: prompt tokens of a step if the flags leave the number open.
        context_length: the longest possible prompt, in tokens.
        page_size: tokens of a page.
    """
    num_tokens = args.prefill_budget(default_chunk) + args.prefill_slack(default_chunk)
    num_tokens += args.max_batch_size
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
) -> int:
    """Return the number of pages of the KV pool.

    Args:
        args: the worker's flags.
        shape: the model's attention.
        kv_dtype: of keys and values.
        device: where the pool is allocated.
        max_tokens: tokens of all slots together; a larger pool is of no use.
        step_bytes: free memory that steps need.
        num_replicas: servers that share the memory, unless each has GPUs of its own.

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
    pool_bytes = int((free_bytes - step_bytes) * fraction)
    num_pages = min(pool_bytes // page_bytes, -(-max_tokens // args.page_size))
    if num_pages < 1:
        for_steps = f" less {step_bytes / MIB:.0f} MiB for a step" if step_bytes else ""
        raise ConfigError(
            f"mem_fraction_static is {fraction}: of {free_bytes / MIB:.0f} MiB free"
            f" memory{for_steps} that does not hold one page of {page_bytes / MIB:.1f} MiB; raise"
            " it, or lower --page-size" + (" or --chunked-prefill-size" if step_bytes else "")
        )
    return num_pages
