"""Build the runner: device, dtype, weights, and the KV pool in the memory that is left.

Before `make_runner` is what it needs on the way: ranges for a profiler, the description of the
kernels for receipts, and the check that a model can be split over ranks.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import ONLY_REPLICA, ReplicaPlace, WorkerArgs
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.models.model_impl import (
    ModelImpl,
    check_flags,
    choose_model_impl,
    native_refusal,
)
from quadriga.server.models.resolve import ModelFiles
from worker_proc.distributed.rendezvous import Rendezvous
from worker_proc.engines.factory import (
    QUANTIZATION_BITS,
    kv_cache_dtype,
    make_engine,
    native_kernels_compute,
)
from worker_proc.engines.transformers_engine import TransformersModel
from worker_proc.engines.transformers_loading import (
    build_empty,
    check_plan,
    load_transformers_model,
    read_config,
)
from worker_proc.loading.loader import load_model
from worker_proc.loading.sharding import WHOLE, TPRank
from worker_proc.models.base import Model
from worker_proc.models.decoder import build_model
from worker_proc.speculation.self_draft import draft_bytes, wants_draft
from worker_proc.startup.devices import (
    choose_device,
    choose_dtype,
    free_memory,
    trim_heap,
    use_gpu,
)
from worker_proc.startup.memory_profile import (
    FirstStart,
    check_weights,
    dense_bytes,
    largest_step,
    num_plan_pages,
    num_pool_pages,
    peak_gpu_bytes,
    rows_of,
    wait_for_memory,
)
from worker_proc.startup.prefill_tuning import GPU_PREFILL_TOKENS
from worker_proc.startup.quantization import (
    AS_STORED,
    choose_quantization,
    log_gguf_weights,
    log_rounding,
    measure_inputs,
    packed_bytes,
    stored_in_fewer_bits,
)
from worker_proc.step.dummy_plans import pooled_plan, release_plan, spread_plan
from worker_proc.step.runner import Runner
from worker_proc.step.slot_table import SlotTable

FP8_TEST_TOKENS = 64

if TYPE_CHECKING:
    from worker_proc.distributed.tp_group import TPGroup


def describe_kernels(args: WorkerArgs, runner: Runner) -> str:
    """Return the engine, its version and the number formats.

    Where the engine is deterministic, the same text and the same model give the same bits.
    """
    weights = str(runner.dtype).removeprefix("torch.")
    if runner.quantization not in ("none", "checkpoint"):
        weights += f" {runner.quantization}"
    pages = "" if args.kv_cache_dtype == "auto" else f", {args.kv_cache_dtype} pages"
    ranks = "" if args.tp == 1 else f", tp {args.tp}"
    return f"{runner.engine.kernels}, {weights}{pages}{ranks}"


def check_ranks(args: WorkerArgs, files: ModelFiles, replica: ReplicaPlace = ONLY_REPLICA) -> None:
    """Raise ConfigError if there are too few devices here, or the model cannot be split."""
    choose_device(args.device, replica.ranks_per_machine(args.tp) - 1)
    if choose_model_impl(files) is ModelImpl.TRANSFORMERS:
        check_plan(read_config(files), args.tp)
    else:
        build_model(files.config, tp_size=args.tp)


def make_runner(
    config: ServerConfig,
    files: ModelFiles,
    part: TPRank = WHOLE,
    meeting: Rendezvous | None = None,
    on_phase: Callable[[str], None] = lambda _: None,
    replica: ReplicaPlace = ONLY_REPLICA,
    run_dir: Path | None = None,
) -> Runner:
    """Load the model, or the part of one rank, and size the KV pool.

    Args:
        config: the server's flags.
        files: the model.
        part: the rank, whose part of each layer is loaded.
        meeting: how the ranks find each other; None for a single rank.
        on_phase: called with the name of each phase at its begin.
        replica: the replica of the rank.
        run_dir: of the server, where the first start leaves its sizes for those after it.

    Raises:
        ConfigError: a device, dtype or size that cannot work.
        ModelError: the model cannot be loaded.
    """
    args, impl = config.worker, choose_model_impl(files)
    check_flags(args, impl)
    chosen = impl is ModelImpl.TRANSFORMERS and files.model_impl == "auto" and part.rank == 0
    if chosen and (reason := native_refusal(files)):
        logging.warning("%s: transformers runs the model instead, more slowly", reason)
    num_ranks = replica.ranks_per_machine(part.count)
    device = choose_device(args.device, part.rank % num_ranks, num_ranks, replica)
    native_kernels = False
    if device.type == "cpu" and impl is ModelImpl.NATIVE:
        on_phase("compile kernels")
        native_kernels = native_kernels_compute(args, device)
    dtype = choose_dtype(args.dtype, device, native_kernels)
    has_draft = wants_draft(config, device, native_kernels)
    config = config.replace(quantization=choose_quantization(config, files, dtype, device))
    args = config.worker
    log_rounding(config, files, dtype)
    record = None if run_dir is None else FirstStart.path(run_dir, part.rank)
    first = FirstStart.read(record)
    if device.type == "cuda":
        use_gpu(device)
        if first is not None:
            on_phase("wait for memory")
            wait_for_memory(device, first.used_bytes)
    free_before = free_memory(device)
    on_phase("load weights")
    ranks = None if meeting is None else _join(part, meeting, device)
    model = _load(config, files, impl, dtype, device, part, ranks, has_draft, on_phase)
    num_slots, context_length = config.scheduler.max_running_requests, files.context_length

    def with_pages(num_pages: int) -> Runner:
        max_decode_rows = config.scheduler.max_batch_size
        drafts = config.scheduler.speculative_method == "ngram"
        engine = make_engine(
            args, model, num_pages, dtype, device, max_decode_rows, ranks, has_draft, drafts
        )
        table = SlotTable(
            num_slots, context_length, num_pages, args.page_size, device, files.vocab_size
        )
        return Runner(engine, table, dtype, model.window, args.quantization)

    step_bytes = draft_bytes(model) if has_draft and isinstance(model, Model) else 0
    if device.type == "cuda":
        on_phase("compile kernels and measure a step")
        step_bytes = _measure_step(config, context_length, with_pages)
        torch.cuda.empty_cache()
    on_phase("make the KV pool")
    kv_dtype, max_tokens = kv_cache_dtype(args, dtype), num_slots * context_length
    num_pages = num_pool_pages(
        args, model.attention_shape, kv_dtype, device, max_tokens, step_bytes,
        replica.num_replicas, first,
    )  # fmt: skip
    if ranks is not None:
        num_pages = ranks.all_reduce_min(num_pages)
    runner = with_pages(num_pages)
    if record is not None and first is None:
        FirstStart(free_before - free_memory(device), num_pages).write(record)
    if kv_dtype == torch.float8_e4m3fn:
        check_fp8_pages(runner, files.vocab_size)
    trim_heap()
    return runner


def check_fp8_pages(runner: Runner, vocab_size: int) -> None:
    """Raise ConfigError if keys or values of a test prompt are too large for e4m3 without scales.

    They became the largest number, or NaN.
    """
    table = runner.table
    num_tokens = min(FP8_TEST_TOKENS, table.num_pages * table.page_size, table.context_length - 1)
    runner.run(spread_plan(num_tokens, table.page_size, vocab_size))
    runner.run(release_plan())
    largest = torch.finfo(torch.float8_e4m3fn).max
    num_pages = -(-num_tokens // table.page_size)
    parts = (part[:num_pages].float().abs() for part in runner.engine.kv_parts())
    if any(not bool((part < largest).all()) for part in parts):
        raise ConfigError(
            "kv_cache_dtype fp8 has no scales, and keys or values of this model exceed its largest"
            f" number, {largest:g}: leave it out"
        )


def _measure_step(
    config: ServerConfig, context_length: int, with_pages: Callable[[int], Runner]
) -> int:
    """Return the bytes of GPU memory that steps need, run on a small pool.

    The largest step runs twice, as the first run compiles. Graphs have memory of their own, as much
    as the largest step that is captured.
    """
    page_size = config.worker.page_size
    plan = largest_step(config.scheduler, GPU_PREFILL_TOKENS, context_length, page_size)
    runner = with_pages(num_plan_pages(plan))
    if runner.only_pooling is not None:
        plan = pooled_plan(plan, runner.only_pooling)
    release = release_plan(len(plan.new))
    runner.run(plan)
    runner.run(release)
    num_bytes = peak_gpu_bytes(lambda: runner.run(plan), runner.table.device)
    if num_tokens := runner.engine.max_graph_tokens:
        runner.run(release)
        captured = rows_of(num_tokens, config.scheduler, context_length, page_size)
        num_bytes += peak_gpu_bytes(lambda: runner.run(captured), runner.table.device)
    return num_bytes


def _join(part: TPRank, meeting: Rendezvous, device: torch.device) -> "TPGroup":
    # torch.distributed is only loaded where it is needed.
    from worker_proc.distributed.tp_group import TPGroup

    return TPGroup(part, meeting, device)


def _load(
    config: ServerConfig,
    files: ModelFiles,
    impl: ModelImpl,
    dtype: torch.dtype,
    device: torch.device,
    part: TPRank,
    ranks: "TPGroup | None",
    has_draft: bool,
    on_phase: Callable[[str], None],
) -> Model | TransformersModel:
    """Load the model by what runs it, after a check that its weights fit a GPU's memory."""
    args, is_native = config.worker, impl is ModelImpl.NATIVE
    if device.type == "cuda":
        empty = (
            build_model(files.config, dtype, tp_size=part.count)
            if is_native
            else build_empty(files, dtype)
        )
        needed, stored, kept = dense_bytes(empty, dtype), stored_in_fewer_bits(files), ""
        if args.quantization != "none":
            needed, stored = packed_bytes(files, empty, dtype, args.quantization), ""
            kept = f"--quantization {args.quantization}"
        check_weights(needed, dtype, free_memory(device), device, stored, kept)
    if not is_native:
        return load_transformers_model(files, dtype, device, part, ranks)
    is_packed, is_native = args.quantization in AS_STORED, native_kernels_compute(args, device)
    if args.quantization != "none" and not is_native:
        return _load_packed(args, files, dtype, device)
    model = load_model(files, dtype, device, is_packed, part)
    if device.type == "cpu":
        log_gguf_weights(files, model, dtype, args.quantization)
    if device.type == "cpu" and (args.quantization == "int4" or has_draft):
        on_phase("measure inputs")
        measure_inputs(model, files.context_length)
    return model


def _load_packed(
    args: WorkerArgs, files: ModelFiles, dtype: torch.dtype, device: torch.device
) -> Model:
    """Load a model whose matrices are multiplied by a GPU in fewer bits.

    The host's memory has the dense weights until they are on the GPU, unless the GPU has room for
    all of them at once. There, one matrix is unpacked at a time.
    """
    from worker_proc.gpu.quantized import Packer

    bits = QUANTIZATION_BITS[args.quantization]
    packer = Packer(device, dtype, bits, args.enable_deterministic_inference)
    reads_on = torch.device("cpu")
    is_rounded = bits is not None and device.type == "cuda"
    if is_rounded and dense_bytes(build_model(files.config), dtype) < free_memory(device):
        reads_on = device
    return load_model(files, dtype, reads_on, bits is None, take_weights=packer.pack)
