"""How the weights of a model are kept: as stored, in 8 or 4 bits, or in the dtype of the server."""

import logging

import torch

from quadriga.config.server_config import ServerConfig
from quadriga.errors import ConfigError, ModelError
from quadriga.model_files.directory import read_json
from quadriga.model_files.gguf.parts import gguf_files
from quadriga.model_files.gguf.types import FLOAT_TYPES, check_packed_types
from quadriga.model_files.quantized.methods import read_quantization
from quadriga.model_files.resolve import ModelFiles
from worker_proc.engine_factory import native_kernels_compute
from worker_proc.models.base import Model

# Values of --quantization after `auto` was resolved, in which quantized matrices stay as stored.
AS_STORED = frozenset({"gguf", "checkpoint"})
EXACT = "--dtype float32 asks for exact products"
MEGABYTE = 1_000_000


def choose_quantization(
    config: ServerConfig, files: ModelFiles, dtype: torch.dtype, device: torch.device
) -> str:
    """Return what --quantization means for a model on a device, and log why.

    Args:
        config: The server's flags.
        files: The model.
        dtype: Of weights that do not stay as stored.
        device: Of the model.

    Returns:
        none, int8, int4, gguf (the blocks of a GGUF stay as stored) or checkpoint (the codes of a
        quantized checkpoint do).

    Raises:
        ConfigError: The checkpoint is quantized, and the flag asks to quantize it.
    """
    wanted, quantization = config.worker.quantization, read_quantization(files.config)
    if files.weights is None:
        return "none" if wanted == "auto" else wanted
    if quantization is not None:
        return _of_checkpoint(config, files, str(quantization), dtype, device)
    if wanted != "auto" or files.tensor_index is None:
        return "none" if wanted == "auto" else wanted
    types = quantized_types(files)
    reason = _why_dense(config, files, device) if types else ""
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


def _why_dense(config: ServerConfig, files: ModelFiles, device: torch.device) -> str:
    """Return why the blocks of a GGUF cannot stay as stored; "" if they can."""
    args = config.worker
    assert files.weights is not None
    assert files.tensor_index is not None
    if args.dtype == "float32":
        return EXACT
    if config.scheduler.speculative_method == "self":
        return "--speculative-method self drafts with fewer bits than the model has"
    if not native_kernels_compute(args, device):
        return "only the native kernels of a CPU multiply them as stored"
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
    elif native_kernels_compute(config.worker, device):
        logging.info("weights: %s, multiplied as they are", method)
        return "checkpoint"
    else:
        reason = "only a CPU's native kernels keep them packed"
    logging.warning(
        "weights: %s, dequantized to %s (%d bits), as %s",
        method, _name(dtype), dtype.itemsize * 8, reason,
    )  # fmt: skip
    return "none"


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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
