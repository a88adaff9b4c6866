"""The structures that Python passes to the CPU kernels, as program.h declares them."""

import ctypes
from enum import IntEnum

import numpy as np
import torch

from quadriga.errors import ModelError
from quadriga.server.models.model_impl import check_native_heads
from worker_proc.models.attention import AttentionShape

LANES = 16  # outputs of a panel
NO_PLACE = -1  # of a matrix that no adapter changes


class OpKind(IntEnum):
    """Kind of an operation."""

    EMBED = 0
    RMS_NORM = 1
    LAYER_NORM = 2
    MATMUL = 3
    MATMUL_ADD = 4
    MATMUL_ACTIVATE = 5
    MATMUL_GATE = 6
    MATMUL_ARGMAX = 7
    ROTATE_WRITE = 8
    ATTEND = 9
    COMBINE = 10
    QUANTIZE = 11
    NORM_ADD = 12
    COPY = 13
    SCALE_CAP = 14
    ARRANGE = 15
    ROUTE = 16
    SORT_ROWS = 17
    GATHER = 18
    ADD_EXPERTS = 19
    ADAPT = 20


class Buffer(IntEnum):
    """A value that operations pass to each other.

    It has a row for each token, or for each chosen expert of each token.
    """

    RESIDUAL = 0
    NORMED = 1
    PROJECTED = 2
    QUERIES = 3
    ATTENDED = 4
    INNER = 5
    LOGITS = 6
    QUANTIZED = 7
    EXPERT_INPUT = 8
    EXPERT_QUANTIZED = 9
    EXPERT_INNER = 10
    EXPERT_OUTPUT = 11
    ARRANGED = 12
    ADAPTED = 13


QUANTIZED_BUFFERS = (Buffer.QUANTIZED, Buffer.EXPERT_QUANTIZED)
FLOAT_BUFFERS = (
    Buffer.RESIDUAL,
    Buffer.PROJECTED,
    Buffer.LOGITS,
    Buffer.EXPERT_OUTPUT,
    Buffer.ARRANGED,
)


class Format(IntEnum):
    """Format of a matrix's panels; MIXED: each panel has its own."""

    DENSE = 0
    INT8 = 1
    INT4 = 2
    Q4_0 = 3
    Q5_0 = 4
    Q5_1 = 5
    Q2_K = 6
    Q3_K = 7
    Q4_K = 8
    Q5_K = 9
    Q6_K = 10
    IQ4_NL = 11
    IQ4_XS = 12
    MXFP4 = 13
    MIXED = 14
    CODED_INT8 = 15
    CODED_INT4 = 16
    CODED_FLOAT8 = 17
    CODED_TABLE4 = 18


class ComputeType(IntEnum):
    """How numbers are multiplied, see numbers.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    BFLOAT16_PAIRS = 2

    @property
    def passed(self) -> torch.dtype:
        """Dtype of the values that operations pass to each other."""
        return torch.bfloat16 if self is ComputeType.BFLOAT16_PAIRS else torch.float32

    def dtype_of(self, buffer: Buffer) -> torch.dtype:
        """Return the dtype of a buffer's values."""
        if buffer in QUANTIZED_BUFFERS:
            return torch.uint8
        return torch.float32 if buffer in FLOAT_BUFFERS else self.passed


class Matrix(ctypes.Structure):
    """A packed weight."""

    _fields_ = [
        ("format", ctypes.c_int64),
        ("panels", ctypes.c_void_p),
        ("panel_units", ctypes.c_int64),
        ("mixed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("columns", ctypes.c_int64),
        ("panel_count", ctypes.c_int64),
        ("depth", ctypes.c_int64),
        ("order", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
    ]


class UpRun(ctypes.Structure):
    """Panels of an adapter's U whose products have the same inputs."""

    _fields_ = [
        ("begin", ctypes.c_int64),
        ("end", ctypes.c_int64),
        ("step", ctypes.c_int64),
        ("words", ctypes.c_void_p),
        ("panel_units", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("depth", ctypes.c_int64),
    ]


class AdapterPlace(ctypes.Structure):
    """What an adapter changes of a matrix."""

    _fields_ = [
        ("changes", ctypes.c_int64),
        ("down", ctypes.c_void_p),
        ("down_panels", ctypes.c_int64),
        ("runs", ctypes.c_void_p),
        ("run_count", ctypes.c_int64),
        ("gain", ctypes.c_void_p),
        ("shift", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
    ]


class Op(ctypes.Structure):
    """An operation of a program."""

    _fields_ = [
        ("kind", ctypes.c_int64),
        ("input", ctypes.c_int64),
        ("output", ctypes.c_int64),
        ("layer", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("sampled", ctypes.c_int64),
        ("matrix", Matrix),
        ("gain", ctypes.c_void_p),
        ("shift", ctypes.c_void_p),
        ("key_gain", ctypes.c_void_p),
        ("epsilon", ctypes.c_double),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
        ("activation", ctypes.c_int64),
        ("norm_whole", ctypes.c_int64),
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("rotated", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
        ("position_bias", ctypes.c_void_p),
        ("bias_stride", ctypes.c_int64),
        ("experts", ctypes.c_void_p),
        ("expert_count", ctypes.c_int64),
        ("num_chosen", ctypes.c_int64),
        ("renormalize", ctypes.c_int64),
        ("by_expert", ctypes.c_int64),
        ("place", ctypes.c_int64),
    ]


class Program(ctypes.Structure):
    """A model, or a part of it, as a list of operations."""

    _fields_ = [
        ("compute_type", ctypes.c_int64),
        ("op_count", ctypes.c_int64),
        ("ops", ctypes.POINTER(Op)),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("padded_dim", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
        ("int8_pages", ctypes.c_int64),
        ("pools", ctypes.POINTER(ctypes.c_void_p)),
        ("position_vectors", ctypes.c_void_p),
        ("second_type", ctypes.c_void_p),
        ("bidirectional", ctypes.c_int64),
        ("adapter_count", ctypes.c_int64),
        ("adapters", ctypes.c_void_p),
    ]


class Step(ctypes.Structure):
    """The rows, tokens and buffers that a program is run for."""

    _fields_ = [
        ("threads", ctypes.c_int64),
        ("token_count", ctypes.c_int64),
        ("tokens", ctypes.c_void_p),
        ("token_stride", ctypes.c_int64),
        ("row_count", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
        ("computed", ctypes.c_void_p),
        ("num_tokens", ctypes.c_void_p),
        ("page_table", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        ("buffers", ctypes.c_void_p * len(Buffer)),
        ("strides", ctypes.c_int64 * len(Buffer)),
        ("sampled_count", ctypes.c_int64),
        ("sampled", ctypes.c_void_p),
        ("argmax", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        ("part_floats", ctypes.c_int64),
        ("op_seconds", ctypes.c_void_p),
        ("nonfinite_from", ctypes.c_void_p),
        ("second_from", ctypes.c_void_p),
        ("has_nonfinite", ctypes.c_int64),
        ("adapters", ctypes.c_void_p),
        ("has_unknown_adapter", ctypes.c_int64),
    ]


class Slots(ctypes.Structure):
    """The slot table's arrays, which a decode step reads and updates."""

    _fields_ = [
        ("count", ctypes.c_int64),
        ("known", ctypes.c_void_p),
        ("computed", ctypes.c_void_p),
        ("num_pages", ctypes.c_void_p),
        ("greedy_only", ctypes.c_void_p),
    ]


SAMPLING_ROW = np.dtype(
    [
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("draw", np.float32),
        ("top_k", np.int64),
    ]
)


def check_layout(library: ctypes.CDLL) -> None:
    """Raise ModelError if the compiled kernels have structures of another size."""
    library.quadriga_size.restype = ctypes.c_int64
    library.quadriga_size.argtypes = [ctypes.c_int64]
    structures = (Matrix, Op, Program, Step, Slots, None, UpRun, AdapterPlace)
    for number, structure in enumerate(structures):
        if structure is None:  # the rows of the sampler, whose fields SAMPLING_ROW has
            continue
        if library.quadriga_size(number) != ctypes.sizeof(structure):
            raise ModelError(
                f"the compiled kernels have another {structure.__name__}: rebuild them"
            )


def check_heads(library: ctypes.CDLL, shape: AttentionShape) -> None:
    """Raise ModelError if the kernels do not support heads of this size or number."""
    limits = (library.quadriga_max_head_dim, library.quadriga_max_group_size)
    for limit in limits:
        limit.restype = ctypes.c_int64
    check_native_heads(shape.heads, shape.kv_heads, shape.head_dim, *(limit() for limit in limits))
