"""Which engine computes on this machine."""

import logging

import torch

from quadriga.config import WorkerArgs
from quadriga.errors import ConfigError
from worker_proc.attention.torch_reference import TorchAttention
from worker_proc.engine import Engine
from worker_proc.kernels.build import NoCompiler
from worker_proc.models.base import Model
from worker_proc.torch_engine import TorchEngine

QUANTISATIONS = {"none": None, "int8": 8, "int4": 4, "gguf": None}
"""Bits to which every matrix is rounded."""


def make_engine(
    args: WorkerArgs, model: Model, num_pages: int, dtype: torch.dtype, device: torch.device
) -> Engine:
    """The native kernels on a CPU, else plain torch. Raises NoCompiler where kernels are asked for
    that cannot be compiled, ConfigError where the device has none."""
    if device.type == "cpu" and args.attention_backend != "torch":
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
    shape = model.attention_shape
    return TorchEngine(model, TorchAttention(shape, num_pages, args.page_size, dtype, device))


def needs_kernels(args: WorkerArgs) -> str:
    """The flags that plain torch does nothing for."""
    flags = []
    if args.quantization != "none":
        flags.append(f"--quantization {args.quantization}")
    if args.kv_cache_dtype != "auto":
        flags.append(f"--kv-cache-dtype {args.kv_cache_dtype}")
    return ", ".join(flags)


def _native(args: WorkerArgs, model: Model, num_pages: int, dtype: torch.dtype) -> Engine:
    from worker_proc.kernels.engine import NativeEngine

    threads, bits = torch.get_num_threads(), QUANTISATIONS[args.quantization]
    int8 = args.kv_cache_dtype == "int8"
    return NativeEngine(model, num_pages, args.page_size, dtype, threads, bits, int8, logging.info)
