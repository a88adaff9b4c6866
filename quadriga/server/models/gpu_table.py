"""The table of docs/install-gpu.md: tokens of KV cache of published models on GPUs.

python -m quadriga.server.models.gpu_table
"""

from typing import Any

from quadriga.server.models.families import architectures, decoder_config
from quadriga.server.models.formats.quantization import is_mxfp4, read_quantization
from quadriga.server.models.gpu_modes import (
    DENSE_BITS,
    MXFP4_EXPERT_BITS,
    GpuWeights,
    gpu_modes,
    stored_bits,
)

QWEN3 = {
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40_960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151_936,
}
LLAMA3 = {
    "model_type": "llama",
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128_256,
}


def _sizes(hidden: int, mlp: int, heads: int, layers: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
    }


# Of the config.json of each model, what decides the sizes.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3 4B": QWEN3 | _sizes(2560, 9728, 32, 36) | {"tie_word_embeddings": True},
    "Llama 3.1 8B": LLAMA3 | _sizes(4096, 14_336, 32, 32),
    "Qwen3 8B": QWEN3 | _sizes(4096, 12_288, 32, 36),
    "Qwen3 14B": QWEN3 | _sizes(5120, 17_408, 40, 40),
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "head_dim": 64,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "quantization_config": {"quant_method": "mxfp4"},
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201_088,
    },
    "Qwen3 32B": QWEN3 | _sizes(5120, 25_600, 64, 64),
    "Llama 3.3 70B": LLAMA3 | _sizes(8192, 28_672, 64, 80),
}
MXFP4 = {"quant_method": "mxfp4"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
FORMATS: dict[str, dict[str, Any]] = {"bfloat16": {}, "FP8": FP8, "AWQ or GPTQ": AWQ}
FORMATS_OF_GPT_OSS: dict[str, dict[str, Any]] = {"bfloat16": {}, "MXFP4, its experts": MXFP4}
CONTEXT_LENGTH = 40_960
CARDS_GIB = (16, 24, 48, 80)


def table_of_cards() -> str:
    """Return the tokens of KV cache of published models on GPUs, as a table in markdown."""
    lines = [
        "| model | weights as | GB | " + " | ".join(f"{size} GiB" for size in CARDS_GIB) + " |",
        "|---|---|---|" + "---|" * len(CARDS_GIB),
    ]
    for name, values in PUBLISHED.items():
        config = architectures.read_architecture(values)
        is_coded = is_mxfp4(values)
        for kind, settings in (FORMATS_OF_GPT_OSS if is_coded else FORMATS).items():
            if settings == MXFP4:
                weights = GpuWeights.of_config(config, MXFP4_EXPERT_BITS, only_experts=True)
            else:
                quantization = read_quantization({"quantization_config": settings})
                bits = stored_bits("I32", quantization) if quantization else DENSE_BITS
                weights = GpuWeights.of_config(config, bits)
            cells = [_cell(config, weights, size * 2**30) for size in CARDS_GIB]
            size = f"{weights.num_bytes(None) / 1e9:.1f}"
            lines.append(f"| {name} | {kind} | {size} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(config: decoder_config.DecoderConfig, weights: GpuWeights, gpu_bytes: int) -> str:
    mode = gpu_modes(config, weights, gpu_bytes, CONTEXT_LENGTH, is_checkpoint=True)[0]
    thousands = mode.num_tokens // 1000
    return f"{thousands:,},000" if thousands else "no"


if __name__ == "__main__":
    print(table_of_cards())
