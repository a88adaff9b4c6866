"""Choose the engine for the device and the flags."""

import logging
import os
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import WorkerArgs
from quadriga.server.models.resolve import weights_digest
from quadriga.server.processes.machine import NoCompiler
from worker_proc.cpu.build import fastest_compute_type, load_kernels
from worker_proc.engines.torch_engine import TorchAttention, TorchEngine
from worker_proc.engines.transformers_engine import TransformersEngine, TransformersModel
from worker_proc.models.base import Model
from worker_proc.models.layers import Linear
from worker_proc.speculation.self_draft import DRAFT_BITS, same_weights
from worker_proc.step.engine import Engine

if TYPE_CHECKING:
    from worker_proc.adapters.change import AdapterLimits
    from worker_proc.cpu.pack_store import PackStore
    from worker_proc.distributed.tp_group import TPGroup

# The packed weights of an engine, and of its draft.
MAIN, DRAFT = "main", "draft"

# A GGUF and a quantized checkpoint have the bits of their own weights.
QUANTIZATION_BITS = {"none": None, "int8": 8, "int4": 4, "gguf": None, "checkpoint": None}
TRITON_BACKENDS = ("triton", "flashinfer")  # values of --attention-backend
FP8_CAPABILITY = (8, 9)  # compute capability of the first GPUs with numbers of 8 bits


def make_engine(
    args: WorkerArgs,
    model: Model | TransformersModel,
    num_pages: int,
    dtype: torch.dtype,
    device: torch.device,
    max_decode_rows: int = 1,
    ranks: "TPGroup | None" = None,
    has_draft: bool = False,
    drafts: bool = False,
    stores: "Mapping[str, PackStore] | None" = None,
    adapters: "AdapterLimits | None" = None,
) -> Engine:
    """Return the CPU kernels' engine on a CPU, Triton's on a GPU, else plain torch.

    A model of transformers has an engine of its own.

    Args:
        args: the worker's flags.
        model: the model, with its weights.
        num_pages: size of the KV pool.
        dtype: of the weights.
        device: where the model is.
        max_decode_rows: rows of the largest decode step.
        ranks: the processes with the other parts of the model.
        has_draft: add a draft of the model in fewer bits; by the native kernels only.
        drafts: tokens will be drafted, for which the graphs of a GPU have to be made.
        stores: as `pack_stores` returns them; None: weights are packed.
        adapters: for which Triton's engine has to make room; the others take any.

    Raises:
        NoCompiler: the flags need kernels that cannot be compiled.
        ConfigError: the flags need kernels that the device does not have.
    """
    if isinstance(model, TransformersModel):
        shape = model.attention_shape
        attention = TorchAttention(shape, num_pages, args.page_size, dtype, device)
        return TransformersEngine(model, attention)
    if _use_triton(args, device, model):
        return _triton(
            args, model, num_pages, dtype, device, max_decode_rows, ranks, drafts, adapters
        )
    if _use_native(args, device):
        try:
            return _native(args, model, num_pages, dtype, has_draft, stores or {})
        except NoCompiler as error:
            if args.attention_backend == "native" or _needs_native(args):
                raise
            logging.warning("%s: plain torch computes instead, several times as slowly", error)
    if flags := kernel_flags(args):
        raise ConfigError(
            f"{flags} needs the native kernels of a CPU: leave it out, or start with --device cpu"
            " and without --attention-backend torch"
        )
    if flags := gpu_kernel_flags(args):
        raise ConfigError(f"{flags} needs a GPU and its kernels: leave it out")
    if args.enable_deterministic_inference:
        raise ConfigError(
            "enable_deterministic_inference needs the native kernels of a CPU or Triton's on a"
            f" GPU, and plain torch computes on {device}: leave it out, or start without"
            " --attention-backend torch"
        )
    if args.attention_backend == "native" and device.type != "cpu":
        raise ConfigError(
            f"attention_backend native needs a cpu, but the device is {device}: start with"
            " --attention-backend auto, or with --device cpu"
        )
    shape = model.attention_shape
    attention = TorchAttention(shape, num_pages, args.page_size, dtype, device)
    return TorchEngine(model, attention, ranks)


def native_kernels_compute(args: WorkerArgs, device: torch.device) -> bool:
    """Return whether `make_engine` will return the CPU kernels' engine; compile them if needed."""
    if not _use_native(args, device):
        return False
    try:
        load_kernels()
    except NoCompiler:
        return False
    return True


def why_not_as_stored(args: WorkerArgs, dtype: torch.dtype, device: torch.device) -> str:
    """Return why `make_engine`'s engine cannot multiply quantized weights as stored; "" if it can.

    Compiles the native kernels if they will compute.
    """
    if native_kernels_compute(args, device):
        return ""
    backend = args.attention_backend
    asks_triton = backend in TRITON_BACKENDS or (backend == "auto" and device.type == "cuda")
    if not asks_triton or find_spec("triton") is None:
        return "plain torch does not multiply them as they are stored"
    from worker_proc.gpu.quantized import why_not_packed

    return why_not_packed(device, dtype, args.tp)


def _use_native(args: WorkerArgs, device: torch.device) -> bool:
    backend = args.attention_backend
    return device.type == "cpu" and backend in ("auto", "native") and args.tp == 1


def cpu_kernel_flags(args: WorkerArgs) -> str:
    """Return the given flags that only the native kernels of a CPU support, for an error."""
    return "--kv-cache-dtype int8" if args.kv_cache_dtype == "int8" else ""


def kernel_flags(args: WorkerArgs) -> str:
    """Return the given flags that plain torch does not support and a CPU's kernels do."""
    is_flag = args.quantization not in ("auto", "none")
    quantization = f"--quantization {args.quantization}" if is_flag else ""
    return ", ".join(filter(None, (quantization, cpu_kernel_flags(args))))


def _needs_native(args: WorkerArgs) -> bool:
    return bool(kernel_flags(args)) or args.enable_deterministic_inference


def gpu_kernel_flags(args: WorkerArgs) -> str:
    """Return the given flags that only the kernels of a GPU support, for an error."""
    return "--kv-cache-dtype fp8" if args.kv_cache_dtype == "fp8" else ""


def kv_cache_dtype(args: WorkerArgs, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of keys and values in the pages."""
    return {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(args.kv_cache_dtype, dtype)


def _use_triton(args: WorkerArgs, device: torch.device, model: Model) -> bool:
    """Return whether Triton's engine computes. Raises ConfigError if it must and cannot."""
    backend, is_installed = args.attention_backend, find_spec("triton") is not None
    if model.attention_shape.bidirectional:
        if backend in TRITON_BACKENDS:
            raise ConfigError(
                f"attention_backend {backend} computes no encoders: leave it out, and plain torch"
                f" computes on {device}"
            )
        return False
    if backend == "auto":
        if device.type == "cuda" and not is_installed:
            logging.warning("triton is not installed: plain torch computes instead, more slowly")
        return device.type == "cuda" and is_installed
    if backend not in TRITON_BACKENDS:
        return False
    if not is_installed:
        raise ConfigError(f"attention_backend {backend} needs the package triton: pip install it")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != ("cpu" if interpreted else "cuda"):
        raise ConfigError(
            f"attention_backend {backend} needs a CUDA device, but the device is {device}"
            " (to check the kernels on a cpu, slowly, set TRITON_INTERPRET=1)"
        )
    if interpreted:
        from worker_proc.gpu.interpreter import accept_numpy_scalars

        accept_numpy_scalars()
    return True


def _triton(
    args: WorkerArgs,
    model: Model,
    num_pages: int,
    dtype: torch.dtype,
    device: torch.device,
    max_decode_rows: int,
    ranks: "TPGroup | None",
    drafts: bool,
    adapters: "AdapterLimits | None",
) -> Engine:
    from worker_proc.gpu.engine import TritonEngine
    from worker_proc.gpu.graphs import CudaCapture, batch_sizes, prompt_sizes

    if flags := cpu_kernel_flags(args):
        raise ConfigError(
            f"{flags} needs the native kernels of a CPU: leave it out on {device}, or take fp8"
        )
    kv_dtype, flashinfer = kv_cache_dtype(args, dtype), args.attention_backend == "flashinfer"
    if flashinfer:
        _check_flashinfer(args, model, dtype, device)
    if kv_dtype == torch.float8_e4m3fn and has_key_bias(model):
        raise ConfigError(
            "kv_cache_dtype fp8 has no scales, and the biases of this model's keys may exceed its"
            " largest number, 448: leave it out"
        )
    if kv_dtype == torch.float8_e4m3fn and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < FP8_CAPABILITY:
            raise ConfigError(
                f"kv_cache_dtype fp8 needs compute capability 8.9, {device} has"
                f" {capability[0]}.{capability[1]}: leave it out"
            )
    with_graphs = device.type == "cuda" and not args.disable_cuda_graph
    return TritonEngine(
        model,
        num_pages,
        args.page_size,
        kv_dtype,
        device,
        deterministic=args.enable_deterministic_inference,
        graph_sizes=batch_sizes(max_decode_rows),
        capture=CudaCapture() if with_graphs else None,
        ranks=ranks,
        flashinfer=flashinfer,
        drafts=drafts,
        adapters=adapters,
        prompt_sizes=prompt_sizes(
            num_pages * args.page_size, sum(weight.numel() for weight in model.parameters())
        ),
    )


def has_key_bias(model: Model) -> bool:
    """Return whether a projection to queries, keys and values has a bias."""
    return any(
        isinstance(module, Linear) and module.bias is not None and name.endswith("qkv_proj")
        for name, module in model.named_modules()
    )


def _check_flashinfer(
    args: WorkerArgs, model: Model, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ConfigError if FlashInfer cannot be used."""
    from worker_proc.gpu.flashinfer import check_flashinfer

    for asked, what in (
        (dtype == torch.float32, "float32"),
        (args.kv_cache_dtype != "auto", f"kv_cache_dtype {args.kv_cache_dtype}"),
        (args.enable_deterministic_inference, "enable_deterministic_inference"),
    ):
        if asked:
            raise ConfigError(
                f"attention_backend flashinfer does not work with {what}: start with"
                " --attention-backend triton"
            )
    check_flashinfer(model, device)


def pack_stores(
    directory: Path, weights: Path, args: WorkerArgs, dtype: torch.dtype, has_draft: bool
) -> "dict[str, PackStore]":
    """Return where the native kernels' packed weights are kept for the next worker.

    Args:
        directory: of the model in the server's run.
        weights: the files of the weights.
        args: the worker's flags.
        dtype: of the weights.
        has_draft: as of `make_engine`.
    """
    from worker_proc.cpu.pack_store import PackStore

    library = load_kernels()
    numbers = fastest_compute_type(library, dtype).name
    settings = f"{dtype} {numbers} {args.quantization} {has_draft} {library._name}"
    key = f"{weights_digest(weights)} {settings}"
    names = (MAIN, DRAFT) if has_draft else (MAIN,)
    return {name: PackStore(directory / f"packed-{name}", key) for name in names}


def _native(
    args: WorkerArgs,
    model: Model,
    num_pages: int,
    dtype: torch.dtype,
    has_draft: bool,
    stores: Mapping[str, "PackStore"],
) -> Engine:
    from worker_proc.cpu.engine import NativeEngine

    if flags := gpu_kernel_flags(args):
        raise ConfigError(f"{flags} needs a GPU and its kernels: leave it out with --device cpu")
    build = partial(
        NativeEngine,
        num_pages=num_pages,
        page_size=args.page_size,
        dtype=dtype,
        threads=torch.get_num_threads(),
        int8_pages=args.kv_cache_dtype == "int8",
    )
    bits = QUANTIZATION_BITS.get(args.quantization)
    if not has_draft:
        return build(model, bits=bits, store=stores.get(MAIN))
    draft = build(  # first: an engine takes the weights
        same_weights(model), bits=DRAFT_BITS, store=stores.get(DRAFT)
    )
    engine = build(model, bits=bits, pools=draft.pools, store=stores.get(MAIN))
    engine.draft = draft
    return engine
