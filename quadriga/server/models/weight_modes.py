"""How a CPU can keep a model's weights, and the speed and memory to expect of each mode.

A decode step of one stream reads all weights that the token needs, so its time is estimated as
their bytes over the memory bandwidth of this machine, and what a step takes beside.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from quadriga.server.models.families.decoder_config import DecoderConfig
from quadriga.server.models.formats.quantization import BLOCK_SIZES

MEASURED_BYTES, MEASURED_S = 384 * 2**20, 0.5  # far more bytes than the caches hold
# Measured on two cores of AMD Zen 5: kernels that unpack weights of 8 bits or fewer read them at
# three quarters of the bandwidth. The speeds that follow were within 25 % of those of servers.
UNPACKING_SHARE = 0.75
# Of a step, beside reading the weights: by layer, and for sampling and the processes on its way.
LAYER_S, STEP_S = 40e-6, 0.4e-3
PROCESS_BYTES = 600_000_000  # main memory of the processes, without weights and KV pool

INT8_BYTES, INT4_BYTES = (
    BLOCK_SIZES[kind].num_bytes / BLOCK_SIZES[kind].weights for kind in ("Q8_0", "Q4_1")
)
INT8_NOTE = "costs about 0.5 % of perplexity"
INT4_NOTE = "costs 3 to 7 % of perplexity"
FLOAT32_NOTE = "answers equal to transformers' to the token"
AS_STORED = "as stored"


@dataclass(frozen=True, slots=True)
class Weights:
    """The sizes that decide the bytes of a way.

    Attributes:
        num_parameters: number of values of all tensors.
        num_skipped: those that a token does not read: embeddings of other tokens, unless the
            embedding is the head, and experts that are not chosen.
        num_bytes: size of the tensors as stored.
        num_layers: number of layers.
    """

    num_parameters: int
    num_skipped: int
    num_bytes: int
    num_layers: int

    @classmethod
    def of(cls, config: DecoderConfig, num_parameters: int, num_bytes: int) -> "Weights":
        """Return the sizes of a model."""
        embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
        return cls(num_parameters, embedding + _idle_experts(config), num_bytes, config.num_layers)


def _idle_experts(config: DecoderConfig) -> int:
    """Return the number of weights of the experts that a token does not choose."""
    experts = config.experts
    if experts is None:
        return 0
    num_layers = config.num_layers - len(experts.dense_layers)
    one = (3 if config.gated else 2) * config.hidden_size * experts.intermediate_size
    return num_layers * (experts.num_experts - experts.num_chosen) * one


@dataclass(frozen=True, slots=True)
class WeightMode:
    """How weights can be kept.

    Attributes:
        name: as stored, or the format.
        flags: of `quadriga serve`; "": none is needed.
        weight_bytes: of the weights in main memory.
        bytes_per_token: that a token of one stream reads.
        memory_bytes: estimate for weights and processes, without the KV pool.
        tokens_per_s: estimate for one stream and a short context; None: not estimated.
        note: what the mode costs or gives; "": nothing.
    """

    name: str
    flags: str
    weight_bytes: int
    bytes_per_token: int
    memory_bytes: int
    tokens_per_s: float | None
    note: str = ""


def weight_modes(
    weights: Weights, stored_bits: str = "", bandwidth: float | None = None
) -> list[WeightMode]:
    """Return the modes that the native kernels have for a model, the default one first.

    Args:
        weights: sizes of the model.
        stored_bits: gguf or checkpoint, where the files have fewer than 16 bits, which the
            kernels multiply as stored; else "".
        bandwidth: bytes per second that this machine reads; None: speeds are not estimated.
    """
    modes = []
    if stored_bits:
        modes.append((AS_STORED, "", weights.num_bytes / max(1, weights.num_parameters), ""))
    modes.append(("bfloat16", "--quantization none" if stored_bits else "", 2, ""))
    if stored_bits != "checkpoint":  # whose codes a server does not round once more
        modes.append(("int8", "--quantization int8", INT8_BYTES, INT8_NOTE))
        modes.append(("int4", "--quantization int4", INT4_BYTES, INT4_NOTE))
    modes.append(("float32", "--dtype float32", 4, FLOAT32_NOTE))
    return [_mode(weights, bandwidth, *mode) for mode in modes]


def _mode(
    weights: Weights, bandwidth: float | None, name: str, flags: str, item_bytes: float, note: str
) -> WeightMode:
    weight_bytes = round(weights.num_parameters * item_bytes)
    read = round((weights.num_parameters - weights.num_skipped) * item_bytes)
    tokens_per_s = None
    if bandwidth is not None:
        share = UNPACKING_SHARE if item_bytes < 2 else 1
        seconds = read / (bandwidth * share) + weights.num_layers * LAYER_S + STEP_S
        tokens_per_s = round(1 / seconds, 1)
    return WeightMode(
        name, flags, weight_bytes, read, weight_bytes + PROCESS_BYTES, tokens_per_s, note
    )


def best_mode(modes: list[WeightMode], free_bytes: int) -> WeightMode | None:
    """Return the mode to take in the memory that is free; None if none fits.

    That is as stored, else the fastest one; int4 costs so much of the answers' quality that it is
    the best only where no other one fits.
    """
    fitting = [mode for mode in modes if mode.memory_bytes < free_bytes]
    good = [mode for mode in fitting if mode.note != INT4_NOTE] or fitting
    return min(good, key=lambda mode: (mode.name != AS_STORED, mode.bytes_per_token), default=None)


def memory_bandwidth(num_threads: int) -> float:
    """Measure how many bytes per second all threads together read. It takes most of a second."""
    import numpy as np

    pieces = np.array_split(np.arange(MEASURED_BYTES // 4, dtype=np.int32), num_threads)

    def read(piece: "np.typing.NDArray[np.int32]") -> float:
        end, began = time.perf_counter() + MEASURED_S, time.thread_time()
        num_bytes = 0
        while time.perf_counter() < end:
            np.min(piece)
            num_bytes += piece.nbytes
        # The thread's own time: other programs may run meanwhile.
        return num_bytes / (time.thread_time() - began)

    with ThreadPoolExecutor(num_threads) as pool:
        return sum(pool.map(read, pieces))
