"""Whether the worker keeps the codes of a quantized checkpoint, or dequantizes them."""

import logging

import torch

from quadriga.config.worker_args import WorkerArgs
from quadriga.errors import ConfigError
from quadriga.model_files.quantized.methods import read_quantization
from quadriga.model_files.resolve import ModelFiles
from worker_proc.engine_factory import native_kernels_compute


def keeps_packed(
    args: WorkerArgs, files: ModelFiles, dtype: torch.dtype, device: torch.device
) -> bool:
    """Return whether quantized matrices stay packed, and log what a checkpoint's become.

    Raises:
        ConfigError: The checkpoint is quantized, and --quantization asks to quantize it.
    """
    quantization = read_quantization(files.config)
    if quantization is None or files.weights is None:
        return args.quantization == "gguf"
    if args.quantization != "none":
        raise ConfigError(
            f"--quantization {args.quantization} cannot be used with {files.location}, whose"
            f" weights are quantized already ({quantization}): leave it out"
        )
    if native_kernels_compute(args, device):
        logging.info("weights: %s, multiplied as they are", quantization)
        return True
    name = str(dtype).removeprefix("torch.")
    logging.warning(
        "weights: %s, dequantized to %s (%d bits); only a CPU's native kernels keep them packed",
        quantization,
        name,
        dtype.itemsize * 8,
    )
    return False
