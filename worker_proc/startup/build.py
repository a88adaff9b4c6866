"""Build the runner: device, dtype, weights, and the KV pool in the memory that is left.

Before `make_runner` is what it needs on the way: the choice of --quantization, ranges for a
profiler, the description of the kernels for receipts, and the check that a model can be split over
ranks.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quadriga.errors import ConfigError, ModelError
from quadriga.server.config.engine_args import (
    GPU_PREFILL_TOKENS,
    ONLY_REPLICA,
    ReplicaPlace,
    WorkerArgs,
)
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.models.formats.directory import read_json
from quadriga.server.models.formats.gguf_reader import gguf_files
from quadriga.server.models.formats.quantization import (
    FLOAT_TYPES,
    check_packed_types,
    is_mxfp4,
    read_quantization,
)
from quadriga.server.models.model_impl import (
    ModelImpl,
    check_flags,
    choose_model_impl,
    native_refusal,
)
from quadriga.server.models.resolve import ModelFiles
from quadriga.wire.packing import pack_ids
from quadriga.wire.worker import EXTEND, NewSlot, StepPlan
from worker_proc.adapters.change import Adapter, AdapterLimits
from worker_proc.adapters.places import Places
from worker_proc.distributed.rendezvous import Rendezvous
from worker_proc.engines.factory import (
    QUANTIZATION_BITS,
    TRITON_BACKENDS,
    kv_cache_dtype,
    make_engine,
    native_kernels_compute,
    pack_stores,
    why_not_as_stored,
)
from worker_proc.engines.torch_engine import TorchAttention, TorchOps
from worker_proc.engines.transformers_engine import TransformersModel
from worker_proc.engines.transformers_loading import (
    build_empty,
    check_plan,
    load_transformers_model,
    read_config,
)
from worker_proc.loading.checkpoints import safetensors_files, seeded_generator
from worker_proc.loading.dense_modules import load_dense_modules
from worker_proc.loading.loader import load_model
from worker_proc.loading.sharding import WHOLE, TPRank
from worker_proc.models.base import Model
from worker_proc.models.decoder import Decoder, build_model
from worker_proc.models.layers import Embedding, Linear
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
from worker_proc.step.dummy_plans import adapted_plan, pooled_plan, release_plan, spread_plan
from worker_proc.step.inputs import StepInputs, make_inputs
from worker_proc.step.runner import Runner
from worker_proc.step.slot_table import SlotTable

# How the weights of a model are kept, and inputs measured for those rounded to 4 bits.

# Values of --quantization after `auto` was resolved, in which quantized matrices stay as stored.
AS_STORED = frozenset({"gguf", "checkpoint"})
EXACT = "--dtype float32 asks for exact products"
MEGABYTE = 1_000_000


def choose_quantization(
    config: ServerConfig, files: ModelFiles, dtype: torch.dtype, device: torch.device
) -> str:
    """Return what --quantization means for a model on a device, and log why.

    Args:
        config: the server's flags.
        files: the model.
        dtype: of weights that do not stay as stored.
        device: of the model.

    Returns:
        none, int8, int4, gguf (the blocks of a GGUF stay as stored) or checkpoint (the codes of a
        quantized checkpoint do).

    Raises:
        ConfigError: the checkpoint is quantized, and the flag asks to quantize it; or the flag asks
            for what a GPU does not have.
    """
    wanted, quantization = config.worker.quantization, read_quantization(files.config)
    is_on_gpu = device.type == "cuda" or config.worker.attention_backend in TRITON_BACKENDS
    is_asked = wanted not in ("auto", "none") and is_on_gpu
    if is_asked and (reason := why_not_as_stored(config.worker, dtype, device)):
        raise ConfigError(f"--quantization {wanted} on {device}: {reason}; or leave it out")
    if files.weights is None:
        return "none" if wanted == "auto" else wanted
    if quantization is not None:
        return _of_checkpoint(config, files, str(quantization), dtype, device)
    if is_mxfp4(files.config) and wanted == "auto":
        return _of_mxfp4(config, dtype, device)
    if wanted != "auto" or files.tensor_index is None:
        return "none" if wanted == "auto" else wanted
    types = quantized_types(files)
    reason = _why_dense(config, files, dtype, device) if types else ""
    if types and not reason:
        return "gguf"
    if reason:
        logging.info("weights: %s of the GGUF become %s, as %s", types, _name(dtype), reason)
    return "none"


def quantized_types(files: ModelFiles) -> str:
    """Return the names of the quantized types of a GGUF's tensors; "" if there are none."""
    if files.tensor_index is None:
        return ""
    types = {entry["type"] for entry in read_json(files.tensor_index).values()}
    return ", ".join(sorted(types - set(FLOAT_TYPES)))


def stored_in_fewer_bits(files: ModelFiles) -> str:
    """Return how the files keep quantized weights; "" if they do not."""
    quantization = read_quantization(files.config)
    return quantized_types(files) if quantization is None else str(quantization)


def _why_dense(
    config: ServerConfig, files: ModelFiles, dtype: torch.dtype, device: torch.device
) -> str:
    """Return why the blocks of a GGUF cannot stay as stored; "" if they can."""
    args = config.worker
    assert files.weights is not None
    assert files.tensor_index is not None
    if args.dtype == "float32":
        return EXACT
    if config.scheduler.speculative_method == "self":
        return "--speculative-method self drafts with fewer bits than the model has"
    if reason := why_not_as_stored(args, dtype, device):
        return reason
    try:
        check_packed_types(files.weights, read_json(files.tensor_index))
    except ModelError as error:
        return str(error)
    return ""


def _of_checkpoint(
    config: ServerConfig, files: ModelFiles, method: str, dtype: torch.dtype, device: torch.device
) -> str:
    """Return how the weights of a quantized checkpoint are kept."""
    wanted = config.worker.quantization
    if wanted not in ("auto", "none"):
        raise ConfigError(
            f"--quantization {wanted} cannot be used with {files.location}, whose weights are"
            f" quantized already ({method}): leave it out"
        )
    if wanted == "none":
        reason = "--quantization none asks for it"
    elif config.worker.dtype == "float32":
        reason = EXACT
    elif not (reason := why_not_as_stored(config.worker, dtype, device)):
        logging.info("weights: %s, multiplied as they are", method)
        return "checkpoint"
    logging.warning(
        "weights: %s, dequantized to %s (%d bits), as %s",
        method, _name(dtype), dtype.itemsize * 8, reason,
    )  # fmt: skip
    return "none"


def _of_mxfp4(config: ServerConfig, dtype: torch.dtype, device: torch.device) -> str:
    """Return how the experts of a gpt-oss are kept; a CPU's kernels multiply them in 16 bits."""
    args = config.worker
    if native_kernels_compute(args, device):
        return "none"
    if reason := why_not_as_stored(args, dtype, device):
        logging.info("weights: experts in MXFP4 become %s, as %s", _name(dtype), reason)
        return "none"
    logging.info("weights: experts in MXFP4, multiplied as they are")
    return "checkpoint"


def log_rounding(config: ServerConfig, files: ModelFiles, dtype: torch.dtype) -> None:
    """Log that the weights of a float16 checkpoint lose bits, where no flag asked for that."""
    stored = files.config.get("dtype") or files.config.get("torch_dtype")
    if stored == "float16" and dtype == torch.bfloat16 and config.worker.dtype == "auto":
        logging.info(
            "weights: float16 in the files, rounded to bfloat16, which has 3 bits less"
            " (--dtype float32 keeps them, and on a GPU --dtype float16)"
        )


def log_gguf_weights(
    files: ModelFiles, model: Model, dtype: torch.dtype, quantization: str
) -> None:
    """Log the bits and bytes of the weights of a GGUF, and those of the other way to keep them."""
    types = quantized_types(files)
    if not types or files.weights is None or quantization not in ("none", "gguf"):
        return
    num_weights = sum(values.numel() for values in model.parameters())
    in_dtype = num_weights * dtype.itemsize
    in_file = sum(file.stat().st_size for file in gguf_files(files.weights))
    if quantization == "gguf":
        logging.info(
            "weights: as stored in the GGUF (%s), %.1f bits each, %d MB; in %s they would be %d MB"
            " (--quantization none)",
            types, 8 * in_file / num_weights, in_file // MEGABYTE, _name(dtype),
            in_dtype // MEGABYTE,
        )  # fmt: skip
    elif in_dtype > in_file:
        logging.info(
            "weights: %s, %d MB; as stored in the GGUF (%s) they are %d MB (--quantization gguf)",
            _name(dtype), in_dtype // MEGABYTE, types, in_file // MEGABYTE,
        )  # fmt: skip


# Bits of a rounded weight on a GPU, scale and zero included, and the factor by which scales of a
# GGUF need more memory there.
ROUNDED_BITS = {"int8": 8.5, "int4": 4.625}
GGUF_GROWTH = 1.12


def packed_bytes(files: ModelFiles, model: nn.Module, dtype: torch.dtype, quantization: str) -> int:
    """Return about how many bytes a GPU needs for weights in fewer bits.

    Args:
        files: the model.
        model: the model without storage.
        dtype: of the weights that stay dense.
        quantization: int8, int4, gguf or checkpoint.
    """
    if quantization == "checkpoint":
        assert files.weights is not None
        return sum(file.stat().st_size for file in safetensors_files(files.weights))
    layers = [layer for layer in model.modules() if isinstance(layer, Linear)]
    linear = sum(layer.weight.numel() for layer in layers)
    num_weights = sum(weight.numel() for weight in model.parameters())
    dense = (num_weights - linear) * dtype.itemsize
    if quantization == "gguf":
        assert files.weights is not None
        stored = sum(file.stat().st_size for file in gguf_files(files.weights))
        return int(stored * GGUF_GROWTH) + dense
    return int(linear * ROUNDED_BITS[quantization] / 8) + dense


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Measure which inputs of each matrix are large, so that rounding keeps their weights precise.
#
# A few of a model's inputs are hundreds of times as large as the others, and so are the errors of
# the weights that multiply them.

MAX_TOKENS = 256
PAGE_SIZE = 16
SEED = 0

Squares = dict[Linear | Embedding, Tensor]


@torch.inference_mode()
def measure_inputs(model: Model, context_length: int) -> None:
    """Set the `importance` of each layer: the sum of each input's squares over random tokens.

    Args:
        model: a model on the CPU, with its weights.
        context_length: its tokens at most.
    """
    dtype = next(model.parameters()).dtype
    num_tokens = min(MAX_TOKENS, context_length)
    num_pages = -(-num_tokens // PAGE_SIZE)
    cpu = torch.device("cpu")
    table = SlotTable(1, num_tokens, num_pages, PAGE_SIZE, cpu)
    attention = TorchAttention(model.attention_shape, num_pages, PAGE_SIZE, dtype, cpu)
    ops = _MeasuringOps(_random_step(model.vocab_size, num_tokens, num_pages, table), attention)
    hidden = model.forward(ops)
    if model.has_head:
        model.compute_logits(ops, hidden)
    for layer, squares in ops.squares.items():
        layer.importance = squares


class _MeasuringOps(TorchOps):
    """Computes as plain torch does, and adds up the squares of all inputs of each matrix.

    Products are in float32, which every CPU multiplies fast.
    """

    def __init__(self, inputs: StepInputs, attention: TorchAttention) -> None:
        super().__init__({}, inputs, attention)
        self.squares: Squares = {}

    def logits(
        self,
        head: Linear | Embedding,
        x: Tensor,
        scale: float = 1.0,  # noqa: ARG002
        softcap: float | None = None,  # noqa: ARG002
    ) -> Tensor:
        """Measure the head's inputs only: its outputs are not needed."""
        self._measure(head, x)
        return x

    def _project(self, weights: Linear | Embedding, bias: Tensor | None, x: Tensor) -> Tensor:
        self._measure(weights, x)
        wide_bias = None if bias is None else bias.float()
        return F.linear(x.float(), weights.weight.float(), wide_bias).to(x.dtype)

    def _measure(self, layer: Linear | Embedding, x: Tensor) -> None:
        squares = x.float().square().sum(0)
        self.squares[layer] = squares + self.squares.get(layer, 0)


def _random_step(vocab_size: int, num_tokens: int, num_pages: int, table: SlotTable) -> StepInputs:
    """Return the prompt step of a slot with tokens that are the same each time."""
    generator = seeded_generator(SEED)
    tokens = torch.randint(vocab_size, (num_tokens,), generator=generator).tolist()
    slot = NewSlot(0, pack_ids(tokens), 0, pack_ids(range(num_pages)), 0.0, -1, 1.0, 0)
    table.admit([slot])
    return make_inputs(StepPlan(1, EXTEND, pack_ids([0]), pack_ids([num_tokens]), [], b""), table)


FP8_TEST_TOKENS = 64

if TYPE_CHECKING:
    from worker_proc.cpu.pack_store import PackStore
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
    keeps_packed: bool = False,
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
        keeps_packed: it leaves the packed weights there, too, as the model is loaded repeatedly.

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
        _prepare_gpu(device, first, on_phase)
    free_before = free_memory(device)
    on_phase("load weights")
    ranks = None if meeting is None else _join(part, meeting, device)
    has_stores = keeps_packed and native_kernels
    stores = _pack_stores(run_dir, has_stores, files, args, dtype, has_draft)
    is_packed = _are_full(stores)
    model = _load(config, files, impl, dtype, device, part, ranks, has_draft, is_packed, on_phase)
    dense = load_dense_modules(files, device)
    places = Places.of(model, part) if isinstance(model, Decoder) else None
    num_slots, context_length = config.scheduler.max_running_requests, files.context_length
    limits = None if places is None else _adapter_limits(config)

    def with_pages(num_pages: int) -> Runner:
        max_decode_rows = config.scheduler.max_batch_size
        drafts = config.scheduler.speculative_method == "ngram"
        engine = make_engine(
            args, model, num_pages, dtype, device, max_decode_rows, ranks, has_draft, drafts,
            stores, limits,
        )  # fmt: skip
        engine.dense = dense
        table = SlotTable(
            num_slots, context_length, num_pages, args.page_size, device, files.vocab_size
        )
        return Runner(engine, table, dtype, model.window, args.quantization)

    step_bytes = draft_bytes(model) if has_draft and isinstance(model, Model) else 0
    if device.type == "cuda":
        on_phase("compile kernels and measure a step")
        step_bytes = _measure_step(config, context_length, with_pages)
        torch.cuda.empty_cache()
    on_phase(_pool_phase(device, is_packed))
    kv_dtype, max_tokens = kv_cache_dtype(args, dtype), num_slots * context_length
    num_pages = num_pool_pages(
        args, model.attention_shape, kv_dtype, device, max_tokens, step_bytes,
        replica.num_replicas, first,
    )  # fmt: skip
    if ranks is not None:
        num_pages = ranks.all_reduce_min(num_pages)
    runner = with_pages(num_pages)
    if runner.engine.supports_adapters:
        runner.places = places
    if record is not None and first is None:
        FirstStart(free_before - free_memory(device), num_pages).write(record)
    if kv_dtype == torch.float8_e4m3fn:
        check_fp8_pages(runner, files.vocab_size)
    trim_heap()
    return runner


def _adapter_limits(config: ServerConfig) -> AdapterLimits | None:
    """Return what adapters there may be; None: there are none."""
    if not config.model.serves_adapters:
        return None
    return AdapterLimits(config.scheduler.max_loras, config.model.max_lora_rank)


def _prepare_gpu(
    device: torch.device, first: FirstStart | None, on_phase: Callable[[str], None]
) -> None:
    """Use a GPU from now on, once the memory of the worker before this one is free again."""
    use_gpu(device)
    if first is not None:
        on_phase("wait for memory")
        wait_for_memory(device, first.used_bytes)


def _pack_stores(
    directory: Path | None,
    is_wanted: bool,
    files: ModelFiles,
    args: WorkerArgs,
    dtype: torch.dtype,
    has_draft: bool,
) -> "dict[str, PackStore]":
    """Return what `pack_stores` does; nothing without a directory, or for random weights."""
    if not is_wanted or directory is None or files.weights is None:
        return {}
    return pack_stores(directory, files.weights, args, dtype, has_draft)


def _are_full(stores: "dict[str, PackStore]") -> bool:
    """Return whether the weights were packed by an earlier worker."""
    return bool(stores) and all(store.is_full for store in stores.values())


def _pool_phase(device: torch.device, is_packed: bool) -> str:
    """Return the name of the phase in which the pool is made, and on a CPU the engine."""
    if device.type != "cpu":
        return "make the KV pool"
    return f"{'read packed weights' if is_packed else 'pack weights'} and make the KV pool"


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
    if config.model.serves_adapters and runner.engine.supports_adapters:
        runner.engine.set_adapter(0, Adapter({}))  # what it takes by itself comes with a load
        plan = adapted_plan(plan, 0)
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
    is_packed_before: bool,
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
    rounds = args.quantization == "int4" or has_draft
    if device.type == "cpu" and rounds and not is_packed_before:
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
    from worker_proc.gpu.quantized_experts import ExpertPacker

    bits = QUANTIZATION_BITS[args.quantization]
    settings = device, dtype, bits, args.enable_deterministic_inference

    def pack(model: Model) -> None:
        ExpertPacker(*settings).pack(model)
        Packer(*settings).pack(model)

    reads_on = torch.device("cpu")
    is_rounded = bits is not None and device.type == "cuda"
    if is_rounded and dense_bytes(build_model(files.config), dtype) < free_memory(device):
        reads_on = device
    return load_model(files, dtype, reads_on, bits is None, take_weights=pack)
