"""Compile each Triton kernel for a GPU that need not exist.

    TRITON_INTERPRET=0 python -m tests.triton_compile

The interpreter takes what the compiler refuses: types that do not fit, shapes that are no powers of
two. In a process of its own, as a kernel is for either of them.
"""

from typing import Any

from triton import compiler
from triton.backends.compiler import GPUTarget

from worker_proc.gpu.kernels import activations, attention, matmul, rotate_write, rows
from worker_proc.models.layers import Activation

HOPPER = GPUTarget("cuda", 90, 32)
IDS, FLOATS, NUMBERS, FP8 = "*i64", "*fp32", "*bf16", "*fp8e4nv"
HEADS = {"KV_HEADS": 3, "DIM": 64, "PAGE_SIZE": 16}


def check(kernel: Any, constants: dict[str, Any], **types: str) -> None:
    """types: of the arguments that are no bfloat16 numbers; *i64 and *fp32 are pointers."""
    signature = {
        name: "constexpr" if name in constants else types.get(name, NUMBERS)
        for name in kernel.arg_names
    }
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    compiler.compile(compiler.ASTSource(kernel, signature, places), target=HOPPER)


def main() -> None:
    paged = {"slots": IDS, "positions": IDS, "page_table": IDS, "page_table_stride": "i32"}
    attending = {**paged, "first_tokens": IDS, "counts": IDS, "scale": "fp32", "softcap": "fp32"}
    attending |= {"q_stride": "i32", "out_stride": "i32", "weights": FLOATS}
    blocks = {**HEADS, "GROUP": 3, "BLOCK_KEYS": attention.BLOCK_KEYS, "BLOCK_DIM": 64}
    plain = {"WINDOW": 0, "CAPPED": False, "HAS_SINKS": False, "LOG2_E": attention.LOG2_E}
    special = {**plain, "WINDOW": 100, "CAPPED": True, "HAS_SINKS": True}
    one = {"BLOCK_ROWS": 16, "ONE_QUERY": True, "SPLITS": 8}
    many = {"BLOCK_ROWS": 64, "ONE_QUERY": False, "SPLITS": 1}
    for options in (plain, special):
        check(attention._attend, blocks | one | options, **attending, out=FLOATS)
    check(attention._attend, blocks | many | plain, **attending, keys=FP8, values=FP8)
    check(attention._attend, blocks | many | special, **attending)
    combining = {"HEADS": 9, "DIM": 64, "BLOCK_DIM": 64, "SPLITS": 8}
    check(attention._combine, combining, parts=FLOATS, weights=FLOATS)
    turning = {**HEADS, "HEADS": 9, "BLOCK_HEADS": 16}
    half = {"HALF": 32, "BLOCK_HALF": 32, "BLOCK_REST": 0}
    quarter = {"HALF": 8, "BLOCK_HALF": 8, "BLOCK_REST": 64}
    for rotated, normed, whole, part in (
        (True, False, False, half),
        (True, True, False, quarter),
        (True, True, True, half),
        (False, True, False, half),
        (False, False, False, half),
    ):
        options = {"ROTATED": rotated, "NORMED": normed, "WHOLE": whole}
        check(rotate_write._rotate_write, turning | part | options, **paged, qkv_stride="i32",
              cosines=FLOATS, sines=FLOATS, epsilon="fp32", offset="fp32")  # fmt: skip
    wide = {"WIDTH": 768, "BLOCK": rows.BLOCK}
    check(rows._embed, {**wide, "HAS_POSITIONS": True}, tokens="*i32", slots=IDS, positions=IDS,
          out=FLOATS, tokens_stride="i32", scale="fp32", first_row="i32")  # fmt: skip
    for centred in (True, False):
        check(rows._add_norm, {**wide, "HAS_ADDED": True, "CENTRED": centred}, residual=FLOATS,
              epsilon="fp32", offset="fp32", factor="fp32")  # fmt: skip
    check(rows._norm_add, wide, residual=FLOATS, epsilon="fp32", offset="fp32")
    for activation in Activation:
        function = {"ACTIVATION": activation.value, "BLOCK": activations.BLOCK}
        check(activations._gate, {**function, "WIDTH": 768, "SLOPE": 1.7, "LIMIT": 7.0})
        if activation is not Activation.CLAMPED_SWIGLU:
            check(activations._activate, function, count="i32")
    check(rows._store_tokens, {"BLOCK": rows.BLOCK}, known="*i32", token_ids=IDS, slots=IDS,
          positions=IDS, known_stride="i32", count="i32")  # fmt: skip
    sizes = ("rows", "columns", "depth", "x_stride", "weight_stride", "out_stride")
    tiles = {"BLOCK_ROWS": 32, "BLOCK_COLUMNS": 64, "BLOCK_DEPTH": 64, "HAS_BIAS": True}
    check(matmul._multiply, tiles, **dict.fromkeys(sizes, "i32"))


if __name__ == "__main__":
    main()
