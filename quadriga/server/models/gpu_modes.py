"""How an NVIDIA GPU can keep a model's weights, and the tokens of KV cache that fit beside them.

Nothing looks at a GPU. The memory of steps is an estimate; the start of a server measures it.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from quadriga.server.config.engine_args import CUDA_FRACTION, GPU_PREFILL_TOKENS, SchedulerArgs
from quadriga.server.models.families.architectures import kv_bytes_per_token
from quadriga.server.models.families.decoder_config import DecoderConfig
from quadriga.server.models.formats.quantization import (
    FLOAT_TYPES,
    CheckpointQuantization,
)
from quadriga.server.models.weight_modes import AS_STORED, INT4_NOTE, INT8_NOTE
from quadriga.server.models.weights import WeightSummary

DENSE_BITS = 16
SCALE_BITS = 16  # of a group of weights, and of its zero unless that is an integer
INT8_BITS, INT4_BITS = 8 + SCALE_BITS / 32, 4 + (SCALE_BITS + 4) / 32  # in groups of 32
# Bits of a weight of each type of GGUF that the kernels multiply, scale and zero included.
GGUF_BITS = {
    "Q4_0": 4 + 16 / 32,
    "Q4_1": 4 + 32 / 32,
    "Q5_0": 5 + 16 / 32,
    "Q5_1": 5 + 32 / 32,
    "Q8_0": 8 + 16 / 32,
    "Q4_K": 4 + 32 / 32,
    "Q5_K": 5 + 32 / 32,
    "Q6_K": 6 + 16 / 16,
    "MXFP4": 4 + 8 / 32,
}
# Of a weight of the experts of gpt-oss: 2,880 inputs and outputs are padded to 2,944.
MXFP4_EXPERT_BITS = 1.03 * GGUF_BITS["MXFP4"]
OTHER_CODES = "codes that become 16 bits: embeddings, or a format without kernels"
# Formats of safetensors in which codes are stored.
CODES = ("I32", "I8", "U8", "F8_E4M3")
# The CUDA context, cuBLAS and the code of the kernels.
CONTEXT_BYTES = 600_000_000
# Of what a step allocates, for what is not listed in `step_bytes`.
STEP_MARGIN = 1.25
LOGIT_BYTES = 16  # of a logit: in 16 bits, and float32 copies for penalties, filters and logprobs
# Tokens times parameters of the largest prompts with a graph, as in worker_proc/gpu/graphs.py.
GRAPH_TOKENS, LAUNCH_BOUND = 1024, 10**12


@dataclass(frozen=True, slots=True)
class GpuWeights:
    """The sizes that decide the bytes of each mode, in numbers of weights.

    Attributes:
        num_parameters: of all tensors.
        num_linear: of linear layers, head and experts among them, which `--quantization` rounds.
        stored: of linear layers that stay as stored, by bits of a weight.
        num_other_codes: of quantized tensors that become dense: embeddings, and formats that the
            kernels do not multiply.
    """

    num_parameters: int
    num_linear: int
    stored: Mapping[float, int]
    num_other_codes: int = 0

    @classmethod
    def of_files(
        cls,
        config: DecoderConfig,
        summary: WeightSummary,
        quantization: CheckpointQuantization | None,
    ) -> "GpuWeights":
        """Return the sizes of a model on disk."""
        stored: Counter[float] = Counter()
        num_codes = 0
        for kind, count in summary.parameters_by_format.items():
            if kind in FLOAT_TYPES:
                continue
            num_codes += count
            bits = stored_bits(kind, quantization)
            if kind == "MXFP4" and config.experts is not None:
                bits = MXFP4_EXPERT_BITS
            if bits and summary.linear_by_format[kind]:
                stored[bits] += summary.linear_by_format[kind]
        total, num_stored = summary.num_parameters, sum(stored.values())
        num_linear = total - _num_embeddings(config)
        return cls(total, num_linear, stored, num_codes - num_stored)

    @classmethod
    def of_config(
        cls, config: DecoderConfig, bits: float = DENSE_BITS, only_experts: bool = False
    ) -> "GpuWeights":
        """Return the sizes of a published model whose layers, but not its head, have `bits`.

        With `only_experts`, only its experts have them.
        """
        head = config.vocab_size * config.hidden_size
        num_linear = _num_linear(config) + _num_experts(config)
        total = num_linear + _num_embeddings(config)
        in_layers = num_linear - (0 if config.tie_word_embeddings else head)
        if only_experts:
            in_layers = _num_experts(config)
        return cls(total, num_linear, {} if bits == DENSE_BITS else {bits: in_layers})

    def num_bytes(self, bits: float | None = None) -> int:
        """Return the bytes with linear layers of `bits` a weight; None: as stored."""
        packed = self.stored if bits is None else {bits: self.num_linear}
        num_packed = sum(packed.values())
        in_bits = sum(bits * count for bits, count in packed.items())
        return round((in_bits + DENSE_BITS * (self.num_parameters - num_packed)) / 8)


def stored_bits(kind: str, quantization: CheckpointQuantization | None) -> float:
    """Return the bits of a weight of a format on a GPU; 0: the kernels do not multiply it."""
    if quantization is None:
        return GGUF_BITS.get(kind, 0)
    scheme = quantization.schemes[0]
    if kind not in CODES or (scheme.layout == "bitsandbytes" and scheme.bits == 4):
        return 0
    group = scheme.block[1] if scheme.block is not None else scheme.group_size
    zero_bits = 0 if scheme.symmetric else scheme.bits
    return scheme.bits + ((SCALE_BITS + zero_bits) / group if group > 0 else 0)


def _num_embeddings(config: DecoderConfig) -> int:
    return (config.vocab_size + config.num_positions) * config.hidden_size


def _num_experts(config: DecoderConfig) -> int:
    experts = config.experts
    if experts is None:
        return 0
    num_layers = config.num_layers - len(experts.dense_layers)
    num_matrices = 3 if config.gated else 2
    each = num_matrices * config.hidden_size * experts.intermediate_size
    return num_layers * experts.num_experts * each


def _num_linear(config: DecoderConfig) -> int:
    hidden, experts = config.hidden_size, config.experts
    width = config.head_dim * config.num_heads
    attention = hidden * (2 * width + 2 * config.head_dim * config.num_kv_heads)
    num_dense = config.num_layers if experts is None else len(experts.dense_layers)
    mlp = (3 if config.gated else 2) * hidden * config.intermediate_size
    head = 0 if config.tie_word_embeddings else config.vocab_size * hidden
    router = 0
    if experts is not None:
        router = (config.num_layers - num_dense) * hidden * experts.num_experts
    return config.num_layers * attention + num_dense * mlp + router + head


@dataclass(frozen=True, slots=True)
class GpuMode:
    """How a GPU can keep the weights.

    Attributes:
        name: as stored, or the format.
        flags: of `quadriga serve`; "": none is needed.
        weight_bytes: in the GPU's memory.
        num_tokens: of the KV cache in 16 bits; 0: it does not fit.
        num_tokens_fp8: with `--kv-cache-dtype fp8`; None: the model cannot have it.
        note: what the mode costs; "": nothing.
    """

    name: str
    flags: str
    weight_bytes: int
    num_tokens: int
    num_tokens_fp8: int | None
    note: str = ""

    @property
    def fits(self) -> bool:
        """Whether a KV cache has room beside the weights."""
        return self.num_tokens > 0


def gpu_modes(
    config: DecoderConfig,
    weights: GpuWeights,
    gpu_bytes: int,
    context_length: int,
    is_checkpoint: bool = False,
) -> list[GpuMode]:
    """Return the modes that a GPU has for a model, the default one first.

    Args:
        config: the model.
        weights: its sizes.
        gpu_bytes: memory of the GPU.
        context_length: tokens of the longest request; all requests together fill the KV cache.
        is_checkpoint: the weights are codes already, which a server does not round once more.
    """
    free = gpu_bytes - step_bytes(config, weights.num_parameters)
    most = SchedulerArgs().max_running_requests * context_length
    note = f"{weights.num_other_codes * 2 / 1e9:.1f} GB are {OTHER_CODES}"
    note = note if weights.num_other_codes else ""
    modes: list[tuple[str, str, float | None, str]] = []
    if weights.stored:
        modes.append((AS_STORED, "", None, note))
    dense_flags, dense_note = ("--quantization none", "") if weights.stored else ("", note)
    modes.append(("bfloat16", dense_flags, DENSE_BITS, dense_note))
    if not is_checkpoint:
        modes.append(("int8", "--quantization int8", INT8_BITS, INT8_NOTE))
        modes.append(("int4", "--quantization int4", INT4_BITS, INT4_NOTE))
    return [
        _mode(config, name, flags, weights.num_bytes(bits), free, most, note)
        for name, flags, bits, note in modes
    ]


def _mode(
    config: DecoderConfig,
    name: str,
    flags: str,
    weight_bytes: int,
    free: int,
    most: int,
    note: str,
) -> GpuMode:
    pool_bytes = max(0, free - weight_bytes) * CUDA_FRACTION
    shape = (config.num_layers, config.num_kv_heads, config.head_dim)
    num_tokens, num_tokens_fp8 = (
        min(most, int(pool_bytes // kv_bytes_per_token(*shape, item_bytes)))
        for item_bytes in (2, 1)
    )
    fp8 = None if config.qkv_bias else num_tokens_fp8
    return GpuMode(name, flags, weight_bytes, num_tokens, fp8, note)


def best_gpu_mode(modes: list[GpuMode]) -> GpuMode | None:
    """Return the first mode that fits; None if none does. They are in the order of quality."""
    return next((mode for mode in modes if mode.fits), None)


def step_bytes(config: DecoderConfig, num_parameters: int) -> int:
    """Estimate the memory of a GPU beside weights and KV cache: of steps, graphs and CUDA."""
    args = SchedulerArgs()
    num_tokens = args.prefill_budget(GPU_PREFILL_TOKENS) + args.prefill_slack(GPU_PREFILL_TOKENS)
    num_tokens += args.max_batch_size
    num_rows = min(args.max_batch_size + args.prefill_width, args.max_running_requests)
    captured = max(GRAPH_TOKENS, min(LAUNCH_BOUND // max(1, num_parameters), num_tokens))
    activations = (num_tokens + captured) * _token_bytes(config)
    logits = 2 * num_rows * config.vocab_size * LOGIT_BYTES
    return round((activations + logits) * STEP_MARGIN) + CONTEXT_BYTES


def _token_bytes(config: DecoderConfig) -> int:
    """Return the bytes of a token in the layer, in float32 and 16 bits."""
    hidden, experts = config.hidden_size, config.experts
    width = config.head_dim * config.num_heads
    attention = 2 * (2 * width + 2 * config.head_dim * config.num_kv_heads)
    num_up = 2 if config.gated else 1
    mlp = 2 * (num_up + 1) * config.intermediate_size
    if experts is not None:
        mlp = max(
            0 if not experts.dense_layers else mlp,
            experts.num_chosen * 2 * ((num_up + 1) * experts.intermediate_size + hidden),
        )
    return 6 * hidden + max(attention, mlp)
