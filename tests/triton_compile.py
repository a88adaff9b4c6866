"""Compile each Triton kernel for GPUs that need not exist, and check what it takes of them.

    TRITON_INTERPRET=0 python -m tests.triton_compile             # a choice that takes a minute
    TRITON_INTERPRET=0 python -m tests.triton_compile --matrix    # every shape for every GPU

The interpreter takes what the compiler refuses: types that do not fit, shapes that are no powers of
two, more shared memory than there is. In a process of its own, as a kernel is for either of them.
Prints shared memory, registers and stack of each kernel.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton import compiler
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget

from worker_proc.gpu.kernels import adapters, attention, experts, few_rows, matmul, rows, sampling
from worker_proc.gpu.kernels import attention as rotate_write
from worker_proc.gpu.kernels import rows as activations
from worker_proc.models.layers import Activation

IDS, FLOATS, NUMBERS, FP8 = "*i64", "*fp32", "*bf16", "*fp8e4nv"
# Bytes of shared memory that a program can have, by compute capability.
SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024,
                120: 99 * 1024}  # fmt: skip
MAX_STACK_BYTES = 256
CUOBJDUMP = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
ALIGNED = ("inputs", "outputs")  # numbers that are multiples of 16
DTYPES = {"*bf16": torch.bfloat16, "*fp16": torch.float16, "*fp32": torch.float32}
HEADS = {"KV_HEADS": 8, "DIM": 64, "PAGE_SIZE": 16}


@dataclass(frozen=True)
class Compiled:
    """A kernel with constants.

    Attributes:
        label: What it is compiled for.
        types: Of the arguments that are no bfloat16 numbers; *i64 and *fp32 are pointers.
        options: Stages and warps.
    """

    label: str
    kernel: Any
    constants: dict[str, Any]
    types: dict[str, str] = field(default_factory=dict)
    options: dict[str, int] = field(default_factory=dict)


def compile_for(one: Compiled, capability: int) -> list[str]:
    """Compile a kernel, print what it takes, and return what is too much."""
    kernel, constants = one.kernel, one.constants
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else one.types.get(name, NUMBERS) for name in names
    }
    places = {(names.index(name),): value for name, value in constants.items()}
    unaligned = set(kernel.do_not_specialize_on_alignment or ())
    attributes = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in signature.items()
        if (kind.startswith("*") or name in ALIGNED or name.endswith("stride"))
        and name not in unaligned
    }
    source = compiler.ASTSource(kernel, signature, places, attributes)
    target = GPUTarget("cuda", capability, 32)
    compiled = compiler.compile(source, target=target, options=one.options)
    usage = resources(compiled.asm["cubin"])
    shared = int(compiled.metadata.shared)
    print(f"sm_{capability:<4}{one.label:<60}shared {shared / 1024:6.1f} KiB  registers"
          f" {usage['REG']:>3}  stack {usage['STACK']:>4} B", flush=True)  # fmt: skip
    wrong = []
    if shared > SHARED_BYTES[capability]:
        wrong.append(f"{one.label} needs {shared} bytes of shared memory on sm_{capability}")
    if usage["STACK"] > MAX_STACK_BYTES:
        wrong.append(f"{one.label} spills {usage['STACK']} bytes on sm_{capability}")
    return wrong


def resources(cubin: bytes) -> dict[str, int]:
    """Return registers, stack and others by cuobjdump's names."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(count) for name, count in re.findall(r"\b([A-Z]+):(\d+)", output)}


def attend(
    head_dim: int, group: int, one_query: bool, dtype: str, kv_dtype: str, is_split: bool,
    writes: bool = False, **special: Any,
) -> Compiled:  # fmt: skip
    """Return the attention kernel as `attend_over_pages` compiles it."""
    tile = attention.tile_of(group, one_query, head_dim, DTYPES[dtype])
    constants = {
        "KV_HEADS": 8, "GROUP": group, "DIM": head_dim, "PAGE_SIZE": 16, "BLOCK_ROWS": tile.rows,
        "BLOCK_KEYS": tile.keys, "BLOCK_DIM": attention.block_dim(head_dim),
        "ONE_QUERY": one_query, "IS_SPLIT": is_split, "WINDOW": 0, "CAPPED": False,
        "HAS_SINKS": False, "LOG2_E": attention.LOG2_E, "EARLY": False, "WRITES": writes,
        "HALF": head_dim // 2, "ROTATED": writes, "NORMED": writes, **special,
    }  # fmt: skip
    types = dict.fromkeys((*attention.INDICES, "page_table", "nonfinite_from"), IDS)
    types |= dict.fromkeys(("cosines", "sines"), FLOATS) | {"epsilon": "fp32", "offset": "fp32"}
    types |= dict.fromkeys(("query_gain", "key_gain"), dtype)
    types |= dict.fromkeys(("q_stride", "page_table_stride", "out_stride", "splits"), "i32")
    types |= {"scale": "fp32", "softcap": "fp32", "q": dtype, "keys": kv_dtype,
              "values": kv_dtype, "sinks": dtype}  # fmt: skip
    types |= dict.fromkeys(("out", "weights"), FLOATS if is_split else dtype)
    kind = ("decode" if one_query else "prompts") + (", split" if is_split else "")
    kind += ", writes" if writes else ""
    label = f"attention {kind}, {head_dim} wide, group {group}, {dtype[1:]}"
    label += f" over {kv_dtype[1:]}" if kv_dtype != dtype else ""
    options = {"num_stages": tile.stages, "num_warps": tile.warps}
    if most := attention.max_registers(tile, writes):
        options["maxnreg"] = most
    return Compiled(label, attention._attend, constants, types, options)


def chosen_attention(capability: int) -> Iterator[Compiled]:
    """Return the shapes that have needed the most, and the most common ones."""
    special: dict[str, Any] = {"WINDOW": 100, "CAPPED": True, "HAS_SINKS": True}
    yield attend(128, 4, True, NUMBERS, NUMBERS, False)
    yield attend(128, 4, True, NUMBERS, NUMBERS, True, writes=True)
    yield attend(128, 4, False, NUMBERS, NUMBERS, False)
    if SHARED_BYTES[capability] == min(SHARED_BYTES.values()):
        # The others have the least room there.
        yield attend(64, 1, False, NUMBERS, NUMBERS, True, **special)
        yield attend(128, 4, False, FLOATS, FLOATS, False)
        yield attend(256, 4, False, NUMBERS, NUMBERS, False)
        yield attend(256, 1, False, FLOATS, FLOATS, False)
    if capability >= 89:
        yield attend(256, 1, False, NUMBERS, FP8, False)


def all_attention(capability: int) -> Iterator[Compiled]:
    for head_dim, group, one_query in product((64, 96, 128, 256), (1, 4, 8), (True, False)):
        for dtype in DTYPES:
            for is_split in (False, True):
                yield attend(head_dim, group, one_query, dtype, dtype, is_split)
            if one_query:
                yield attend(head_dim, group, True, dtype, dtype, True, writes=True)
        if capability >= 89:
            yield attend(head_dim, group, one_query, NUMBERS, FP8, False)


def one_of_each_kernel(capability: int) -> Iterator[Compiled]:
    """Return every kernel but attention for each type of order, with the last of its shapes."""
    kernels = {(one.kernel, one.types.get("order")): one for one in other_kernels(capability)}
    yield from kernels.values()


def other_kernels(capability: int) -> Iterator[Compiled]:
    combining = {"HEADS": 9, "DIM": 64, "BLOCK_DIM": 64, "MAX_SPLITS": attention.MAX_SPLITS}
    combining["EARLY"] = early = capability >= 90
    yield Compiled("combine", attention._combine, combining,
                   {"parts": FLOATS, "weights": FLOATS, "splits": "i32"})  # fmt: skip
    paged = {"slots": IDS, "positions": IDS, "page_table": IDS, "page_table_stride": "i32"}
    turning = {**HEADS, "HEADS": 32, "BLOCK_HEADS": 64, "BLOCK_OUT": 4096}
    half = {"HALF": 32, "BLOCK_HALF": 32, "BLOCK_REST": 0}
    quarter = {"HALF": 8, "BLOCK_HALF": 8, "BLOCK_REST": 64}
    for rotated, normed, whole, part in (
        (False, False, False, half),
        (False, True, False, half),
        (True, False, False, half),
        (True, True, True, half),
        (True, True, False, quarter),
    ):
        options = {"ROTATED": rotated, "NORMED": normed, "WHOLE": whole}
        types = {**paged, "qkv_stride": "i32", "cosines": FLOATS, "sines": FLOATS}
        types["nonfinite_from"] = IDS
        types |= {"epsilon": "fp32", "offset": "fp32"}
        label = f"rotate and write, rotated {rotated}, normed {normed}, whole {whole}"
        yield Compiled(label, rotate_write._rotate_write, turning | part | options, types)
    wide = {"WIDTH": 768, "BLOCK": rows.BLOCK}
    yield Compiled("embed", rows._embed, {**wide, "HAS_POSITIONS": True},
                   {"tokens": "*i32", "slots": IDS, "positions": IDS, "out": FLOATS,
                    "tokens_stride": "i32", "scale": "fp32", "first_row": "i32"})  # fmt: skip
    scalars = {"residual": FLOATS, "epsilon": "fp32", "offset": "fp32", "factor": "fp32"}
    for width, centred in product((768, 8192), (True, False)):
        sizes = {"WIDTH": width, "BLOCK": triton.next_power_of_2(width)}
        warps = {"num_warps": rows.num_warps_of(sizes["BLOCK"])}
        yield Compiled(f"add and norm, {width} wide, centred {centred}", rows._add_norm,
                       {**sizes, "HAS_ADDED": True, "CENTRED": centred, "EARLY": early}, scalars,
                       warps)  # fmt: skip
        if centred:
            yield Compiled(f"norm and add, {width} wide", rows._norm_add, sizes, scalars, warps)
    for activation in Activation:
        function = {"ACTIVATION": activation.value, "BLOCK": activations.BLOCK}
        yield Compiled(f"gate, {activation.value}", activations._gate,
                       {**function, "WIDTH": 768, "SLOPE": 1.7, "LIMIT": 7.0})  # fmt: skip
        if activation is not Activation.CLAMPED_SWIGLU:
            label = f"activate, {activation.value}"
            yield Compiled(label, activations._activate, function, {"count": "i32"})
    scalar_names = ("rows", "columns", "depth", "x_stride", "weight_stride", "out_stride")
    for dtype in DTYPES:
        tile = matmul.tile_of(DTYPES[dtype])
        tiles = {"BLOCK_ROWS": tile.rows, "BLOCK_COLUMNS": tile.columns, "BLOCK_DEPTH": tile.depth,
                 "HAS_BIAS": True}  # fmt: skip
        types = dict.fromkeys(scalar_names, "i32") | dict.fromkeys(
            ("x", "weight", "bias", "out"), dtype
        )
        yield Compiled(f"deterministic product, {dtype[1:]}", matmul._multiply, tiles, types,
                       {"num_stages": tile.stages, "num_warps": tile.warps})  # fmt: skip
    tiles = {"BLOCK_ROWS": 32, "BLOCK_COLUMNS": 64, "BLOCK_DEPTH": 64, "HAS_BIAS": True}
    tiles |= {"CHOSEN": 2, "NUM_EXPERTS": 8}
    routed = dict.fromkeys(experts.ROUTED, "*i32")
    ids = dict.fromkeys(("weights", "biases"), IDS) | routed
    for is_sorted in (True, False):
        yield Compiled(f"experts, sorted {is_sorted}", experts._multiply_experts,
                       {**tiles, "SORTED": is_sorted},
                       {**ids, "columns": "i32", "depth": "i32"})  # fmt: skip
    for ordered in (True, False):
        gathering = {"WIDTH": 2880, "CHOSEN": 4, "HAS_ORDER": ordered, "BLOCK": experts.BLOCK}
        yield Compiled(f"rows of experts, ordered {ordered}", experts._gather_rows, gathering,
                       {**routed, "orders": "*i32"})  # fmt: skip
    summing = {"WIDTH": 768, "CHOSEN": 3, "BLOCK": experts.BLOCK}
    yield Compiled("sum of experts", experts._sum_experts, summing,
                   {**routed, "weights": FLOATS})  # fmt: skip
    yield from routing_kernels()
    yield from sampling_kernels()
    yield mask_kernel()
    yield from few_rows_kernels(capability)
    yield from adapter_kernels()


def adapter_kernels() -> Iterator[Compiled]:
    tables = dict.fromkeys(("table", "order", "blocks", "slots", "positions", "adapters"), IDS)
    tables |= {"last_block": IDS, "pairs": "*i32", "chosen": "*i32", "num_pairs": "i32"}
    yield Compiled("pairs with adapters", adapters._cut_pairs,
                   {"CHOSEN": 8, "PAIRS": adapters.CUT_PAIRS, "BLOCK_ROWS": adapters.BLOCK_ROWS},
                   tables, {"num_warps": adapters.CUT_WARPS})  # fmt: skip
    tables |= dict.fromkeys(("number", "num_matrices", "inputs", "outputs", "x_stride"), "i32")
    tables |= dict.fromkeys(("y_stride", "thin_stride", "split_stride", "known_stride"), "i32")
    tables |= {"thin": FLOATS, "scale": "fp32"}
    block = {"BLOCK_ROWS": adapters.BLOCK_ROWS}
    of_rows = {"CHOSEN": 1, "X_SORTED": False}
    of_pairs = {"CHOSEN": 8, "X_SORTED": False}
    splits = (1, adapters.NUM_SPLITS)
    for dtype, parts, rows_are in product(DTYPES, splits, (of_pairs, of_rows)):
        types = tables | dict.fromkeys(("x", "y", "bias", "like"), dtype)
        is_of_pairs = rows_are is of_pairs
        types |= {"order": "*i32" if is_of_pairs else IDS}
        label = f"adapters of {'pairs' if is_of_pairs else 'rows'}, {dtype[1:]}, {parts} splits"
        shrinking = {
            **block, **rows_are, "BLOCK_RANKS": adapters.BLOCK_RANKS,
            "BLOCK_INPUTS": adapters.BLOCK_INPUTS, "NUM_SPLITS": adapters.NUM_SPLITS,
            "SPLITS": adapters.NUM_SPLITS // parts,
            "PROGRAMS": adapters.RANK_PROGRAMS,
        }  # fmt: skip
        yield Compiled(f"{label}: D x", adapters._shrink, shrinking, types,
                       {"num_stages": adapters.STAGES})  # fmt: skip
        expanding = {
            **block, **rows_are, "Y_SORTED": is_of_pairs, "BLOCK_OUTPUTS": adapters.TILE_OUTPUTS,
            "COLUMNS": adapters.UP_COLUMNS, "SAVED_COLUMNS": adapters.SAVED_COLUMNS,
            "NUM_PARTS": parts, "HAS_BIAS": not is_of_pairs,
        }  # fmt: skip
        yield Compiled(f"{label}: U t", adapters._expand, expanding, types)
        if is_of_pairs:
            continue
        adding = {**block, "WIDTH": 768, "COLUMNS": adapters.EMBEDDING_COLUMNS}
        yield Compiled(f"{label}: embeddings", adapters._add_embedding, adding,
                       {**types, "known": "*i32", "out": FLOATS})  # fmt: skip


def few_rows_kernels(capability: int) -> Iterator[Compiled]:
    """Return the kernel for few rows with each of its tiles, and what surrounds the products."""
    types = dict.fromkeys(("rows", "inputs", "outputs", "splits"), "i32") | {"arrived": "*i32"}
    types |= dict.fromkeys(("epsilon", "offset", "factor"), "fp32") | {"parts": FLOATS}
    for num_rows, is_gated, norm, adds in (
        (1, True, "rms", False),
        (1, False, "layer", False),
        (1, False, "", True),
        (16, True, "", False),
        (16, False, "", True),
        (64, True, "", False),
        (64, False, "", True),
    ):
        for tile in few_rows.tiles_of(num_rows, is_gated):
            constants = {
                "ROWS": tile.rows, "BLOCK_OUTPUTS": tile.outputs, "BLOCK_INPUTS": tile.inputs,
                "STAGES": tile.stages, "IS_SPLIT": not norm, "NORM": norm, "HAS_BIAS": True,
                "GATED": is_gated, "ACTIVATION": "silu" if is_gated else "", "ADDS": adds,
                "SLOPE": 1.7, "LIMIT": 7.0, "EARLY": capability >= 90,
            }  # fmt: skip
            label = f"{num_rows} rows by {tile.outputs} x {tile.inputs}, norm {norm or None},"
            label += f" gated {is_gated}, adds {adds}"
            special = {"x": FLOATS} if norm else {}
            special |= {"out": FLOATS} if adds else {}
            yield Compiled(label, few_rows._multiply_few, constants, types | special,
                           {"num_warps": tile.warps})  # fmt: skip


def routing_kernels() -> Iterator[Compiled]:
    types = dict.fromkeys(experts.ROUTED, "*i32") | {"weights": FLOATS}
    types |= {"tokens": "i32", "num_blocks": "i32"}
    types |= {"order": IDS}
    sizes = product((8, 60, 128, 256), (1, 2, 4, 8), (True, False), (False, True))
    for num_experts, chosen, alone, ordered in sizes:
        block_chosen = triton.next_power_of_2(chosen)
        shape = {
            "EXPERTS": num_experts, "CHOSEN": chosen, "BLOCK_CHOSEN": block_chosen,
            "TOKENS": experts.ROUTED_PAIRS // block_chosen, "BLOCK_ROWS": experts.BLOCK_ROWS,
            "BLOCK_EXPERTS": max(16, triton.next_power_of_2(num_experts)), "HAS_ORDER": ordered,
        }  # fmt: skip
        label = f"{chosen} of {num_experts} experts, ordered {ordered}"
        kinds = {"RENORMALIZE": True, "ALONE": alone}
        warps = {"num_warps": experts.ROUTING_WARPS}
        yield Compiled(f"{label}, alone {alone}", experts._route, shape | kinds, types, warps)
        if not alone:
            yield Compiled(f"{label} sorted", experts._sort,
                           {**shape, "COUNTED": experts.COUNTED}, types, warps)  # fmt: skip


def sampling_kernels() -> Iterator[Compiled]:
    sizes = {"CHUNKS": 32, "BLOCK": sampling.BLOCK}
    spans = {"SPANS": 8, "SPAN": sampling.SPAN, "LIKELY": sampling.likely_of_span(8)}
    types = dict.fromkeys(("maxima", "temperatures", "top_ps", "min_ps"), FLOATS)
    types |= dict.fromkeys(("slots", "positions", "top_ks", "seeds", "token_ids"), IDS)
    types |= dict.fromkeys(("weights", "drawn"), IDS)
    types |= dict.fromkeys(("places", "likely", "num_likely", "num_finite", "known"), "*i32")
    types |= dict.fromkeys(("vocab_size", "num_chunks", "num_spans"), "i32")
    types |= dict.fromkeys(("logits_stride", "known_stride"), "i32")
    for logits in (NUMBERS, FLOATS):
        for kernel, constants, warps in (
            (sampling._chunk_maxima, sizes, sampling.CHUNK_WARPS),
            (
                sampling._weigh_spans,
                {**sizes, **spans, "BLOCK": sampling.SPAN_BLOCK},
                sampling.CHUNK_WARPS,
            ),
            (sampling._sample, sizes | spans, sampling.ROW_WARPS),
        ):
            label = f"sampling{kernel.__name__}, {logits[1:]}"
            options = {"num_warps": warps}
            yield Compiled(label, kernel, constants, {**types, "logits": logits}, options)


def mask_kernel() -> Compiled:
    types = {"scores": FLOATS, "rows": IDS, "masks": "*u8"}
    types |= dict.fromkeys(("vocab_size", "scores_stride", "masks_stride"), "i32")
    options = {"num_warps": sampling.CHUNK_WARPS}
    constants = {"BLOCK": sampling.BLOCK}
    return Compiled("masks of grammars", sampling._mask_forbidden, constants, types, options)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--matrix", action="store_true", help="every shape for every GPU")
    parser.add_argument("--capabilities", type=int, nargs="+", choices=SHARED_BYTES)
    arguments = parser.parse_args()
    everywhere = list(SHARED_BYTES) if arguments.matrix else [89, 90]
    print(f"Triton {triton.__version__}")
    wrong: list[str] = []
    for capability in arguments.capabilities or everywhere:
        attending = all_attention if arguments.matrix else chosen_attention
        for one in attending(capability):
            wrong += compile_for(one, capability)
        every = other_kernels if arguments.matrix else one_of_each_kernel
        if arguments.matrix or capability == 90:
            for one in every(capability):
                wrong += compile_for(one, capability)
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
