"""Write an adapter of PEFT as a GGUF, as llama.cpp's converter does."""

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.torch import load_file

MAX_BLOCKS = 4


def gguf_adapter(model_dir: Path, adapter_dir: Path, file: Path, architecture: str = "") -> Path:
    """Write an adapter without patterns; return the file.

    Args:
        model_dir: of the model, whose config.json says how Q and K are permuted.
        adapter_dir: of PEFT.
        file: to be written.
        architecture: that the file names; "": that of the model.
    """
    model = json.loads((model_dir / "config.json").read_text())
    config = json.loads((adapter_dir / "adapter_config.json").read_text())
    kind = model["model_type"].removesuffix("_text")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], MAX_BLOCKS)
    writer = gguf.GGUFWriter(file, architecture or kind)
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", config["lora_alpha"])
    for name, tensor in load_file(adapter_dir / "adapter_model.safetensors").items():
        module, _, part = name.removeprefix("base_model.model.").rpartition(".lora_")
        values = tensor.numpy()
        if part == "B.weight" and kind in ("granite", "llama", "smollm3"):
            heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
            if (key := heads.get(module.rpartition(".")[2])) is not None:
                halves = values.reshape(model[key], 2, -1, values.shape[1])
                values = halves.swapaxes(1, 2).reshape(values.shape)
        stored = names.get_name(f"{module.removeprefix('transformer.')}.weight", (".weight",))
        assert stored is not None
        writer.add_tensor(f"{stored}.lora_{part[0].lower()}", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
