"""The structures of program.h, as Python fills them in, and what the compiled kernels say of
themselves."""

import ctypes
from enum import IntEnum

import numpy as np
import torch

from quadriga.errors import ModelError
from worker_proc.attention.base import AttentionShape


class OpKind(IntEnum):
    EMBED = 0
    RMS_NORM = 1
    LAYER_NORM = 2
    MATMUL = 3
    MATMUL_ADD = 4
    MATMUL_GELU = 5
    MATMUL_SWIGLU = 6
    MATMUL_BEST = 7
    ROTATE_WRITE = 8
    ATTEND = 9
    COMBINE = 10
    QUANTISE = 11


class Buffer(IntEnum):
    """What passes between operations; each a row for every token."""

    RESIDUAL = 0
    NORMED = 1
    PROJECTED = 2
    QUERIES = 3
    ATTENDED = 4
    INNER = 5
    LOGITS = 6
    QUANTISED = 7


class Format(IntEnum):
    """Of a matrix's panels."""

    DENSE = 0
    INT8 = 1
    INT4 = 2


class ComputeType(IntEnum):
    """How they are multiplied: see numbers.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    BFLOAT16_PAIRS = 2

    @property
    def passed(self) -> torch.dtype:
        """Of what operations pass to each other."""
        return torch.bfloat16 if self is ComputeType.BFLOAT16_PAIRS else torch.float32


class Matrix(ctypes.Structure):
    _fields_ = [
        ("format", ctypes.c_int64),
        ("panels", ctypes.c_void_p),
        ("panel_units", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
        ("columns", ctypes.c_int64),
        ("panel_count", ctypes.c_int64),
        ("depth", ctypes.c_int64),
    ]


class Op(ctypes.Structure):
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
    ]


class Program(ctypes.Structure):
    _fields_ = [
        ("numbers", ctypes.c_int64),
        ("op_count", ctypes.c_int64),
        ("ops", ctypes.POINTER(Op)),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
        ("int8_pages", ctypes.c_int64),
        ("pools", ctypes.POINTER(ctypes.c_void_p)),
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("position_vectors", ctypes.c_void_p),
    ]


class Step(ctypes.Structure):
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
        ("best", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        ("part_floats", ctypes.c_int64),
        ("seconds", ctypes.c_void_p),
    ]


class Slots(ctypes.Structure):
    _fields_ = [
        ("count", ctypes.c_int64),
        ("known", ctypes.c_void_p),
        ("computed", ctypes.c_void_p),
        ("num_pages", ctypes.c_void_p),
        ("plain", ctypes.c_void_p),
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
    """ModelError where the compiled kernels have other structures than these."""
    library.quadriga_size.restype = ctypes.c_int64
    library.quadriga_size.argtypes = [ctypes.c_int64]
    for number, structure in enumerate((Matrix, Op, Program, Step, Slots)):
        if library.quadriga_size(number) != ctypes.sizeof(structure):
            raise ModelError(
                f"the compiled kernels have another {structure.__name__}: rebuild them"
            )


def check_heads(library: ctypes.CDLL, shape: AttentionShape) -> None:
    """ModelError where the kernels have no room for such heads."""
    shared = shape.heads // shape.kv_heads
    for what, value, most in (
        ("heads of {}", shape.head_dim, library.quadriga_max_head_dim),
        ("{} query heads for each key head", shared, library.quadriga_max_shared),
    ):
        most.restype = ctypes.c_int64
        if value > most():
            raise ModelError(
                f"the model has {what.format(value)}, the native kernels compute at most {most()};"
                " take --attention-backend torch"
            )


def fastest_numbers(library: ctypes.CDLL, dtype: torch.dtype) -> ComputeType:
    """For this dtype on this CPU, measured."""
    if dtype == torch.float32:
        return ComputeType.FLOAT32
    library.quadriga_bfloat16.restype = ctypes.c_int64
    return ComputeType(library.quadriga_bfloat16())
