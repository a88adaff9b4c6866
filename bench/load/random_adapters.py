"""Random adapters of every projection of a Llama-like model, in the forms that servers read."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

Pair = tuple[NDArray[np.float16], NDArray[np.float16]]  # [rank, inputs] and [outputs, rank]
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_peft(directory: Path, config: Mapping[str, Any], number: int, rank: int) -> None:
    """Write an adapter as PEFT does; its numbers depend on `number`."""
    tensors = {}
    for layer, name, (down, up) in _pairs(config, number, rank):
        place = f"base_model.model.model.layers.{layer}.{name}"
        tensors[f"{place}.lora_A.weight"] = down
        tensors[f"{place}.lora_B.weight"] = up
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank,
        "target_modules": [name.rpartition(".")[2] for name in GGUF_NAMES],
    }  # fmt: skip
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(settings))


def write_gguf(path: Path, config: Mapping[str, Any], number: int, rank: int) -> None:
    """Write the same adapter as a GGUF, but with rows of queries and keys in their own order."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 2.0 * rank)
    for layer, name, (down, up) in _pairs(config, number, rank):
        place = f"blk.{layer}.{GGUF_NAMES[name]}.weight"
        writer.add_tensor(f"{place}.lora_a", down)
        writer.add_tensor(f"{place}.lora_b", up)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _pairs(config: Mapping[str, Any], number: int, rank: int) -> Iterator[tuple[int, str, Pair]]:
    """Yield layer, projection, and both matrices."""
    heads = config["num_attention_heads"]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // heads
    kv = config.get("num_key_value_heads", heads) * head_dim
    sizes = (
        (hidden, heads * head_dim), (hidden, kv), (hidden, kv), (heads * head_dim, hidden),
        (hidden, inner), (hidden, inner), (inner, hidden),
    )  # fmt: skip
    generator = np.random.default_rng(number)
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in zip(GGUF_NAMES, sizes, strict=True):
            down = generator.standard_normal((rank, inputs), np.float32) / inputs**0.5
            up = generator.standard_normal((outputs, rank), np.float32) * 0.02
            yield layer, name, (down.astype(np.float16), up.astype(np.float16))
