"""A config.json as published, often in an older form, means what transformers reads in it."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from quadriga.errors import ModelError
from quadriga.server.models.families.architectures import read_architecture
from worker_proc.models.decoder import rope_frequencies

PHI = {
    "model_type": "phi3",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 4,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "vocab_size": 32064,
}
FACTORS = {"long_factor": [1.0 + pair for pair in range(48)], "short_factor": [1.0] * 48}
PHI_128K = {
    **PHI,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_scaling": {**FACTORS, "type": "longrope"},
    "sliding_window": 262144,
    "tie_word_embeddings": False,
}
PYTHIA = {
    "model_type": "gpt_neox",
    "hidden_act": "gelu",
    "hidden_size": 512,
    "intermediate_size": 2048,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "num_attention_heads": 8,
    "num_hidden_layers": 6,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
    "vocab_size": 50304,
}
GLM = {
    "model_type": "glm",
    "attention_bias": True,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-07,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151552,
}
OPT = {
    "model_type": "opt",
    "_remove_final_layer_norm": False,
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "max_position_embeddings": 2048,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}
STARCODER2 = {
    "model_type": "starcoder2",
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "max_position_embeddings": 16384,
    "mlp_type": "default",
    "norm_epsilon": 1e-05,
    "norm_type": "layer_norm",
    "num_attention_heads": 24,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rope_theta": 999999.4420358813,
    "sliding_window": 4096,
    "use_bias": True,
    "vocab_size": 49152,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Phi-3-mini-4k": {**PHI, "max_position_embeddings": 4096, "sliding_window": 2047},
    "Phi-3.5-mini": PHI_128K,
    "Phi-4": {
        **PHI,
        "hidden_size": 5120,
        "num_attention_heads": 40,
        "num_key_value_heads": 10,
        "max_position_embeddings": 16384,
        "original_max_position_embeddings": 16384,
        "rope_scaling": None,
        "rope_theta": 250000,
        "sliding_window": None,
    },
    "Phi-4-mini": {
        **PHI_128K,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.75,
        "tie_word_embeddings": True,
    },
    "pythia": PYTHIA,
    "pythia without what has a default": {
        key: value for key, value in PYTHIA.items() if "rot" not in key and "parallel" not in key
    },
    "RedPajama-INCITE": {**PYTHIA, "rotary_pct": 1.0, "use_parallel_residual": False},
    "glm-4-9b-chat-hf": GLM,
    "GLM-4-9B-0414": {**GLM, "model_type": "glm4", "attention_bias": False},
    "glm without what has a default": {
        key: value for key, value in GLM.items() if key not in ("partial_rotary_factor", "head_dim")
    },
    "opt-125m": OPT,
    "galactica": {**OPT, "activation_function": "gelu"},
    "starcoder2": STARCODER2,
    "starcoder2 without a window": {**STARCODER2, "sliding_window": None},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_as_transformers_reads_it(name: str) -> None:
    published = PUBLISHED[name]
    kind = published["model_type"]
    fields = {key: value for key, value in published.items() if key != "model_type"}
    current = AutoConfig.for_model(kind, **deepcopy(fields)).to_dict()
    ours, theirs = read_architecture(dict(published)), read_architecture(current)
    assert replace(ours, ropes=()) == replace(theirs, ropes=())
    for rope, expected in zip(ours.ropes, theirs.ropes, strict=True):
        if expected is None:
            assert rope is None
            continue
        assert rope is not None
        for length in (2048, 4097):
            frequencies, factor = rope_frequencies(rope, length)
            expected_frequencies, expected_factor = rope_frequencies(expected, length)
            torch.testing.assert_close(frequencies, expected_frequencies, rtol=0, atol=0)
            assert factor == expected_factor


@pytest.mark.parametrize("kind", ["su", "yarn"])
def test_the_earlier_names_of_longrope_in_a_phi3(kind: str) -> None:
    (rope, *_) = read_architecture({**PHI_128K, "rope_scaling": {**FACTORS, "type": kind}}).ropes
    assert rope is not None
    assert (rope.kind, rope.original_length) == ("longrope", 4096)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({**OPT, "do_layer_norm_before": False}, "do_layer_norm_before = False; supported: True"),
        ({**OPT, "word_embed_proj_dim": 512}, "word_embed_proj_dim = 512; supported: 768"),
        ({**OPT, "layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine = False"),
        ({**STARCODER2, "norm_type": "rms_norm"}, "norm_type = 'rms_norm'"),
        ({**PYTHIA, "hidden_act": "mish"}, "hidden_act = 'mish'; supported"),
    ],
)
def test_what_is_not_implemented_is_refused(config: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        read_architecture(config)
