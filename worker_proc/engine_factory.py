"""Which engine computes on this machine."""

import logging
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from quadriga.config.worker_args import WorkerArgs
from quadriga.errors import ConfigError
from worker_proc.attention.torch_reference import TorchAttention
from worker_proc.cpu.build import NoCompiler, load_kernels
from worker_proc.models.base import Model
from worker_proc.step.engine_base import Engine
from worker_proc.torch_engine import TorchEngine

if TYPE_CHECKING:
    from worker_proc.distributed.tp_group import TPGroup

QUANTISATIONS = {"none": None, "int8": 8, "int4": 4, "gguf": None}
"""Bits to which every matrix is rounded."""
FP8_CAPABILITY = (8, 9)
"""Of the first cards that have numbers of 8 bits."""


def make_engine(
    args: WorkerArgs,
    model: Model,
    num_pages: int,
    dtype: torch.dtype,
    device: torch.device,
    decode_rows: int = 1,
    ranks: "TPGroup | None" = None,
) -> Engine:
    """The native kernels on a CPU, Triton's on a card, else plain torch. decode_rows: the most that
    a decode step will have; ranks: who has the other parts of the model. Raises NoCompiler where
    kernels are asked for that cannot be compiled, ConfigError where the device has none."""
    if _takes_triton(args, device):
        return _triton(args, model, num_pages, dtype, device, decode_rows, ranks)
    if _may_be_native(args, device):
        try:
            return _native(args, model, num_pages, dtype)
        except NoCompiler as error:
            if args.attention_backend == "native" or needs_kernels(args):
                raise
            logging.warning("%s: plain torch computes instead, several times as slowly", error)
    if flags := needs_kernels(args):
        raise ConfigError(
            f"{flags} needs the native kernels of a CPU: leave it out, or start with --device cpu"
            " and without --attention-backend torch"
        )
    if flags := needs_triton(args):
        raise ConfigError(f"{flags} needs a card and its kernels: leave it out")
    shape = model.attention_shape
    attention = TorchAttention(shape, num_pages, args.page_size, dtype, device)
    return TorchEngine(model, attention, ranks)


def native_kernels_compute(args: WorkerArgs, device: torch.device) -> bool:
    """What `make_engine` will come to. The kernels are compiled now, if they were not before."""
    if not _may_be_native(args, device):
        return False
    try:
        load_kernels(logging.info)
    except NoCompiler:
        return False
    return True


def _may_be_native(args: WorkerArgs, device: torch.device) -> bool:
    backend = args.attention_backend
    return device.type == "cpu" and backend in ("auto", "native") and args.tp == 1


def needs_kernels(args: WorkerArgs) -> str:
    """The flags that only the native kernels of a CPU do something for."""
    flags = []
    if args.quantization != "none":
        flags.append(f"--quantization {args.quantization}")
    if args.kv_cache_dtype == "int8":
        flags.append(f"--kv-cache-dtype {args.kv_cache_dtype}")
    return ", ".join(flags)


def needs_triton(args: WorkerArgs) -> str:
    """The flags that only the kernels of a card do something for."""
    flags = []
    if args.enable_deterministic_inference:
        flags.append("--enable-deterministic-inference")
    if args.kv_cache_dtype == "fp8":
        flags.append(f"--kv-cache-dtype {args.kv_cache_dtype}")
    return ", ".join(flags)


def kept_as(args: WorkerArgs, dtype: torch.dtype) -> torch.dtype:
    """In which dtype keys and values are kept."""
    return {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(args.kv_cache_dtype, dtype)


def _takes_triton(args: WorkerArgs, device: torch.device) -> bool:
    """ConfigError where it is asked for and cannot be had."""
    if args.attention_backend == "auto":
        if device.type != "cuda":
            return False
        if find_spec("triton") is None:
            logging.warning("triton is not installed: plain torch computes instead, more slowly")
            return False
        return True
    backend = args.attention_backend
    if backend not in ("triton", "flash"):
        return False
    if find_spec("triton") is None:
        raise ConfigError(f"attention_backend {backend} needs the package triton: pip install it")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != ("cpu" if interpreted else "cuda"):
        raise ConfigError(
            f"attention_backend {backend} needs a CUDA device, but the device is {device}"
            " (to check the kernels on a cpu, slowly, set TRITON_INTERPRET=1)"
        )
    return True


def _triton(
    args: WorkerArgs,
    model: Model,
    num_pages: int,
    dtype: torch.dtype,
    device: torch.device,
    decode_rows: int,
    ranks: "TPGroup | None",
) -> Engine:
    from worker_proc.gpu.engine import TritonEngine
    from worker_proc.gpu.graphs import CudaCapture, batch_sizes

    if flags := needs_kernels(args):
        raise ConfigError(f"{flags} needs the native kernels of a CPU: leave it out on {device}")
    kept, flash = kept_as(args, dtype), args.attention_backend == "flash"
    if flash:
        _check_flash(args, dtype)
    if kept == torch.float8_e4m3fn and device.type == "cuda":
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
        kept,
        device,
        args.enable_deterministic_inference,
        batch_sizes(args.cuda_graph_max_bs or decode_rows),
        CudaCapture() if with_graphs else None,
        ranks,
        flash,
    )


def _check_flash(args: WorkerArgs, dtype: torch.dtype) -> None:
    """Raises ConfigError where torch's flash attention cannot do it."""
    try:
        from worker_proc.gpu import flash
    except ImportError:
        raise ConfigError(
            f"attention_backend flash needs a later torch than {torch.__version__}, one whose"
            " varlen_attn_out takes a block_table; start with --attention-backend triton"
        ) from None
    for asked, what in (
        (dtype == torch.float32, "float32"),
        (args.kv_cache_dtype != "auto", f"kv_cache_dtype {args.kv_cache_dtype}"),
        (args.enable_deterministic_inference, "enable_deterministic_inference"),
    ):
        if asked:
            raise ConfigError(
                f"attention_backend flash does not work with {what}: start with"
                " --attention-backend triton"
            )
    flash.activate()


def _native(args: WorkerArgs, model: Model, num_pages: int, dtype: torch.dtype) -> Engine:
    from worker_proc.cpu.engine import NativeEngine

    if flags := needs_triton(args):
        raise ConfigError(f"{flags} needs a card and its kernels: leave it out with --device cpu")
    threads, bits = torch.get_num_threads(), QUANTISATIONS[args.quantization]
    int8 = args.kv_cache_dtype == "int8"
    return NativeEngine(model, num_pages, args.page_size, dtype, threads, bits, int8, logging.info)
