"""Choose how the weights of a model are kept, and measure inputs for those rounded to 4 bits."""

import logging

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quadriga.errors import ConfigError, ModelError
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.models.formats.directory import read_json
from quadriga.server.models.formats.gguf_reader import gguf_files
from quadriga.server.models.formats.quantization import (
    FLOAT_TYPES,
    check_packed_types,
    read_quantization,
)
from quadriga.server.models.resolve import ModelFiles
from quadriga.wire.packing import pack_ids
from quadriga.wire.worker import EXTEND, NewSlot, StepPlan
from worker_proc.engines.factory import why_not_as_stored
from worker_proc.engines.torch_engine import TorchAttention, TorchOps
from worker_proc.loading.checkpoints import safetensors_files, seeded_generator
from worker_proc.models.base import Model
from worker_proc.models.layers import Embedding, Linear
from worker_proc.step.inputs import StepInputs, make_inputs
from worker_proc.step.slot_table import SlotTable

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
    is_asked = wanted not in ("auto", "none") and device.type == "cuda"
    if is_asked and (reason := why_not_as_stored(config.worker, dtype, device)):
        raise ConfigError(f"--quantization {wanted} on {device}: {reason}; or leave it out")
    if files.weights is None:
        return "none" if wanted == "auto" else wanted
    if quantization is not None:
        return _of_checkpoint(config, files, str(quantization), dtype, device)
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
ROUNDED_BITS = {"int8": 8.5, "int4": 4.75}
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
