"""Write a GGUF of a few kilobytes with a byte-level vocabulary."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from tokenizers.pre_tokenizers import ByteLevel

BYTES = sorted(ByteLevel.alphabet())
MERGES = ["Ġ a", "a b", "Ġ ab", "1 2"]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
TOKENS = [*SPECIAL, "<user-defined>", *BYTES, *(merge.replace(" ", "") for merge in MERGES)]
CONTROL, USER_DEFINED, NORMAL = 3, 4, 1
TYPES = [CONTROL] * len(SPECIAL) + [USER_DEFINED] + [NORMAL] * (len(BYTES) + len(MERGES))


def write_tiny_gguf(path: Path, architecture: str = "llama", **overrides: Any) -> Path:
    """Write the file, and return its path.

    `overrides` may have `pre`, `kind` (tokenizer.ggml.model), `add_bos`, `output` (untied head),
    `scaling`, `fill` (ids of the tokens for filling in the middle, by the header's names),
    `templates` (further chat templates by name), `keys` (of the architecture), `sampling` (top_k is
    an integer), `max_tensors` (of each file, if the model is split), `rows` (of the embedding),
    `head_rows`, `eos` (an id), `ids` (of further special tokens, by the header's names) and
    `in_8_bits` (a matrix is in Q8_0).
    """
    writer = GGUFWriter(path, architecture, split_max_tensors=overrides.get("max_tensors", 0))
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    if architecture == "llama":
        writer.add_head_count_kv(2)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10000.0)
    else:
        writer.add_layer_norm_eps(1e-5)
    if "scaling" in overrides:
        writer.add_string(f"{architecture}.rope.scaling.type", overrides["scaling"])
    for key, value in overrides.get("keys", {}).items():
        adds = {bool: writer.add_bool, int: writer.add_uint32}
        adds.get(type(value), writer.add_float32)(f"{architecture}.{key}", value)
    for key, value in overrides.get("sampling", {}).items():
        add = writer.add_int32 if key == "top_k" else writer.add_float32
        add(f"general.sampling.{key}", value)
    _add_tokenizer(writer, overrides)
    rows = overrides.get("rows", len(TOKENS))
    writer.add_tensor("token_embd.weight", np.zeros((rows, 32), dtype=np.float32))
    if overrides.get("in_8_bits"):
        blocks = np.zeros((16, 34), dtype=np.uint8)
        writer.add_tensor("blk.0.attn_k.weight", blocks, raw_dtype=GGMLQuantizationType.Q8_0)
    else:
        writer.add_tensor("blk.0.attn_k.weight", np.zeros((16, 32), dtype=np.float16))
    if overrides.get("output"):
        rows = overrides.get("head_rows", rows)
        writer.add_tensor("output.weight", np.ones((rows, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: GGUFWriter, overrides: dict[str, Any]) -> None:
    writer.add_tokenizer_model(overrides.get("kind", "gpt2"))
    writer.add_tokenizer_pre(overrides.get("pre", "smollm"))
    writer.add_token_list(TOKENS)
    writer.add_token_types(TYPES)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(overrides.get("eos", 1))
    named = overrides.get("templates", {})
    templates = [{"name": name, "template": text} for name, text in named.items()]
    default = {"name": "default", "template": "{{ messages }}"}
    writer.add_chat_template([default, *templates] if templates else default["template"])
    if "add_bos" in overrides:
        writer.add_add_bos_token(overrides["add_bos"])
    for role, token_id in {**overrides.get("fill", {}), **overrides.get("ids", {})}.items():
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", token_id)
