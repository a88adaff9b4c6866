"""Read the tensors of a checkpoint by their names: safetensors, GGUF, or random numbers.

The generator of random numbers and the decoding of MXFP4 experts come before the sources.
"""

import dataclasses
import enum
import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quadriga.errors import ModelError
from quadriga.server.models.families.decoder_config import DecoderConfig
from quadriga.server.models.formats.directory import WEIGHT_INDEX, indexed_shards
from quadriga.server.models.formats.gguf_config import ROPE_TENSORS, VOCABULARY_TENSORS
from quadriga.server.models.formats.gguf_reader import gguf_files
from quadriga.server.models.formats.quantization import BLOCK_SIZES, check_packed_types
from worker_proc.models.base import Model, plain_name
from worker_proc.models.quantized_weights import CodedRows, PackedRows, StackedRows


def seeded_generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator of random numbers.

    torch.Generator cannot be called before rng_prims is imported, which `import torch` does through
    modules that the worker defers (startup/torch_import.py).
    """
    import torch._prims.rng_prims

    return torch.Generator(device).manual_seed(seed)


# Join or decode the MXFP4 weights of gpt-oss, which are a tensor of codes and one of scales.
#
# Format: OCP Microscaling Formats 1.0, https://www.opencompute.org/documents.

CODES, SCALES = "_blocks", "_scales"


def with_mxfp4(
    tensors: Iterator[tuple[str, Tensor | PackedRows]], packed: bool = False
) -> Iterator[tuple[str, Tensor | PackedRows | StackedRows]]:
    """Yield the tensors of a checkpoint, those in MXFP4 as [experts, inputs, outputs] bfloat16.

    With `packed`, they keep their codes.

    Raises:
        ModelError: codes have no scales, or scales no codes.
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        end = next((end for end in (CODES, SCALES) if name.endswith(end)), None)
        if end is None or not isinstance(tensor, Tensor):
            yield name, tensor
            continue
        whole = name.removesuffix(end)
        parts = waiting.setdefault(whole, {})
        parts[end] = tensor
        if len(parts) == 2:
            del waiting[whole]
            codes, scales = parts[CODES], parts[SCALES]
            if tuple(scales.shape) != tuple(codes.shape[:3]):
                raise ModelError(
                    f"MXFP4 codes of {list(codes.shape)} have scales of {list(scales.shape)}; they"
                    f" need {list(codes.shape[:3])}: fetch the files again"
                )
            yield whole, StackedRows(codes, scales) if packed else decoded(codes, scales)
    if waiting:
        name, parts = next(iter(waiting.items()))
        raise ModelError(
            f"the checkpoint has {name}{next(iter(parts))}, but not the other one of"
            f" {name}{CODES} and {name}{SCALES}; fetch the files again"
        )


def decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the exact values [experts, inputs, outputs] of `StackedRows` in bfloat16."""
    experts, outputs, groups, half = codes.shape
    values = codes.new_empty((experts, outputs, groups * half * 2), dtype=torch.bfloat16)
    for number, rows in enumerate(StackedRows(codes, scales)):
        values[number] = rows.dense()
    return values.transpose(1, 2)


# Read the tensors of a checkpoint: safetensors, GGUF, or random numbers.
#
# A source yields (name, tensor) pairs one at a time, so that at most one tensor is held beside
# the model. Packed rows are views of the mapped file, unless their order has to change.

DUMMY_SEED = 0
DUMMY_STD = 0.02
COMPARED_ROWS = 4096  # of a head and an embedding at a time

POSITION_EMBEDDING = "position_embd.weight"

# Whether a tensor is read, by its name as in a Hugging Face checkpoint.
IsWanted = Callable[[str], bool]
NamedTensors = Iterator[tuple[str, Tensor | PackedRows]]
StoredTensors = Iterator[tuple[str, Tensor | PackedRows | CodedRows | StackedRows]]


def every_tensor(_: str) -> bool:
    """Return True: every tensor is wanted."""
    return True


def from_safetensors(
    directory: Path, device: torch.device, is_wanted: IsWanted = every_tensor
) -> NamedTensors:
    """Yield the wanted tensors of a directory's *.safetensors, read straight to the device.

    Raises:
        ModelError: there is no such file, or one cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    for file in safetensors_files(directory):
        try:
            with safe_open(file, framework="pt", device=str(device)) as tensors:
                for name in tensors.keys():  # noqa: SIM118 (safe_open is not a mapping)
                    if is_wanted(name):
                        yield name, tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read {file}: {error}; fetch the file again") from None


def safetensors_files(directory: Path) -> list[Path]:
    """Return the files that the index names, or all if there is no index."""
    files = indexed_shards(directory)
    if files:
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ModelError(f"{directory} lacks {', '.join(missing)}, named in {WEIGHT_INDEX}")
        return files
    single = directory / "model.safetensors"
    files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{directory} has no *.safetensors file")
    return files


class StoredHead(enum.Enum):
    """What a checkpoint has for the head of a model whose embedding is its head.

    Attributes:
        TIED: the embedding alone, or the same values for both.
        OWN: other values than the embedding's.
        ONLY: the head alone, which is the embedding as well.
    """

    TIED = enum.auto()
    OWN = enum.auto()
    ONLY = enum.auto()


def find_stored_head(directory: Path, config: DecoderConfig) -> StoredHead:
    """Compare the head and the embedding of a directory's *.safetensors.

    As in transformers, a head of its own counts, whatever `tie_word_embeddings` says.

    Raises:
        ModelError: a file cannot be read.
    """
    from safetensors import SafetensorError

    with ExitStack() as opened:
        try:
            files = [opened.enter_context(_opened(file)) for file in safetensors_files(directory)]
            stored = {
                plain_name(config, name): (file, name)
                for file in files
                for name in file.keys()  # noqa: SIM118 (safe_open is not a mapping)
            }
            head, embedding = f"{config.name('head')}.", f"{config.name('embedding')}.weight"
            if not any(name.startswith(head) for name in stored):
                return StoredHead.TIED
            if embedding not in stored:
                return StoredHead.ONLY
            # A quantized head has other tensors.
            if f"{head}weight" not in stored:
                return StoredHead.OWN
            slices = [
                file.get_slice(name) for file, name in (stored[f"{head}weight"], stored[embedding])
            ]
            return StoredHead.TIED if _are_equal(*slices) else StoredHead.OWN
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read {directory}: {error}; fetch the files again") from None


def _opened(file: Path) -> Any:
    """Open a *.safetensors. Raise ModelError if it cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"cannot read {file}: {error}; fetch the file again") from None


def _are_equal(first: Any, second: Any) -> bool:
    """Return whether two slices of safetensors have the same shape and values."""
    if first.get_shape() != second.get_shape():
        return False
    rows = first.get_shape()[0]
    return all(
        torch.equal(first[at : at + COMPARED_ROWS].float(), second[at : at + COMPARED_ROWS].float())
        for at in range(0, rows, COMPARED_ROWS)
    )


def head_as_embedding(source: StoredTensors, config: DecoderConfig) -> StoredTensors:
    """Yield the tensors, the head under the name of the embedding."""
    head = f"{config.name('head')}.weight"
    for name, tensor in source:
        is_head = plain_name(config, name) == head
        yield f"{config.name('embedding')}.weight" if is_head else name, tensor


def from_gguf(
    file: Path,
    tensor_index: Path,
    config: dict[str, Any],
    packed: bool = False,
    is_wanted: IsWanted = every_tensor,
) -> NamedTensors:
    """Yield the wanted tensors of a GGUF, named and laid out as in a Hugging Face checkpoint.

    Args:
        file: the GGUF; the first file of a split one.
        tensor_index: JSON {name: {type, shape (outermost first), offset, bytes, part}}; without a
            part, the tensor is in the first file.
        config: the model's config.json.
        packed: keep quantized matrices packed, always as [outputs, inputs]. Without it, everything
            is unpacked to float32.
        is_wanted: returns whether a tensor is read.

    Raises:
        ModelError: the architecture or the type of a tensor is not supported.
    """
    architecture = str(config.get("model_type"))
    if architecture not in _GGUF_NAMES:
        supported = ", ".join(sorted(_GGUF_NAMES))
        raise ModelError(f"{file} is a GGUF of {architecture}; supported: {supported}")
    tensors: dict[str, dict[str, Any]] = json.loads(tensor_index.read_text())
    if packed:
        check_packed_types(file, tensors)
    data = [np.asarray(np.memmap(part, mode="c", dtype=np.uint8)) for part in gguf_files(file)]
    for name, entry in tensors.items():
        if name in ROPE_TENSORS or not is_wanted(hf_name(name, architecture)):
            continue
        begin = entry["offset"]
        raw = data[entry.get("part", 0)][begin : begin + entry["bytes"]]
        kind, shape = entry["type"], entry["shape"]
        rows = raw.reshape(math.prod(shape[:-1]), -1)
        if name in VOCABULARY_TENSORS:
            rows = rows[: config.get("vocab_size")]
            shape = [len(rows), *shape[1:]]
        is_matrix = len(shape) == 2 and name != POSITION_EMBEDDING
        tensor: Tensor | PackedRows
        if kind in BLOCK_SIZES:
            tensor = PackedRows(kind, torch.from_numpy(rows), f"{file}: {name}")
            if not (packed and is_matrix):
                tensor = tensor.dense().view(shape)
        else:
            tensor = dequantize_rows(rows, kind, f"{file}: {name}").view(shape)
        yield hf_name(name, architecture), _undo_conversion(name, tensor, config)


def dequantize_rows(rows: Any, kind: str, what: str) -> Tensor:
    """Return the values [rows, weights of a row] of bytes [rows, bytes of a row] in float32."""
    if kind in _PLAIN_TYPES:
        return torch.from_numpy(rows).view(_PLAIN_TYPES[kind]).float()
    from gguf import GGMLQuantizationType  # takes longer to import than most models' norms to read
    from gguf.quants import dequantize

    try:
        values = dequantize(rows, GGMLQuantizationType[kind])
    except NotImplementedError:
        raise ModelError(f"{what} has the unsupported type {kind}") from None
    return torch.from_numpy(np.require(values, np.float32, ["C", "W"]))


def _undo_conversion(
    name: str, tensor: Tensor | PackedRows, config: dict[str, Any]
) -> Tensor | PackedRows:
    """Undo the changes of layout that the converter to GGUF made.

    Llama, Mistral, Granite, SmolLM3: the rotary pairs of Q and K are interleaved; here they are
    half a head apart. GPT-2: weights are [outputs, inputs]; its checkpoints have [inputs, outputs].
    Gemma: 1 is added to the weights of norms.
    """
    if config["model_type"] in ("gemma", "gemma2", "gemma3") and isinstance(tensor, Tensor):
        return tensor - 1 if name.endswith("norm.weight") else tensor
    is_block = name.startswith("blk.")
    if config["model_type"] == "gpt2" and is_block and isinstance(tensor, Tensor):
        return tensor.t() if tensor.dim() == 2 else tensor
    if isinstance(tensor, PackedRows):
        return dataclasses.replace(tensor, data=deinterleave_heads(name, tensor.data, config))
    return deinterleave_heads(name, tensor, config)


def deinterleave_heads(name: str, rows: Tensor, config: dict[str, Any]) -> Tensor:
    """Move the even rows of each Q and K head before the odd ones.

    Other matrices, and those of families that the converter to GGUF leaves as they are, are
    returned unchanged.
    """
    if config["model_type"] not in ("granite", "llama", "mistral", "smollm3"):
        return rows
    num_heads = config["num_attention_heads"]
    if ".attn_k." in name:
        num_heads = config.get("num_key_value_heads") or num_heads
    elif ".attn_q." not in name:
        return rows
    pairs = rows.view(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


_PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LLAMA_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk": "model.layers",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_NAMES = {
    **_LLAMA_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OLMO_NAMES = {
    **_LLAMA_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GGUF_NAMES = {
    "gemma": _LLAMA_NAMES,
    "gemma2": _GEMMA_NAMES,
    "gemma3": _GEMMA_NAMES,
    "granite": _LLAMA_NAMES,
    "llama": _LLAMA_NAMES,
    "mistral": _LLAMA_NAMES,
    "phi3": {
        **_LLAMA_NAMES,
        "attn_qkv": "self_attn.qkv_proj",
        "ffn_up": "mlp.gate_up_proj",
    },
    "starcoder2": {**_LLAMA_NAMES, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    "olmo2": _OLMO_NAMES,
    "qwen2": _LLAMA_NAMES,
    "qwen3": _LLAMA_NAMES,
    "smollm3": _LLAMA_NAMES,
    "gpt2": {
        "token_embd": "wte",
        "position_embd": "wpe",
        "output_norm": "ln_f",
        "output": "lm_head",
        "blk": "h",
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
}
# The families whose GGUFs are read.
GGUF_FAMILIES = frozenset(_GGUF_NAMES)


def hf_name(name: str, architecture: str) -> str:
    """Translate `blk.3.attn_q.weight` to `model.layers.3.self_attn.q_proj.weight`.

    Parts that are unknown are kept.
    """
    names = _GGUF_NAMES[architecture]
    return ".".join(names.get(part, part) for part in name.split("."))


def fill_at_random(model: Model) -> None:
    """Fill weights with the same normal random numbers each time, norms with 1, biases with 0."""
    device = next(model.parameters()).device
    generator = seeded_generator(DUMMY_SEED, device)
    for name, tensor in model.named_parameters():
        if name.endswith("bias"):
            tensor.zero_()
        elif "norm" in name:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, DUMMY_STD, generator=generator)
