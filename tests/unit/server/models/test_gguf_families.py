"""The metadata of a GGUF become the config.json of the checkpoint it was made from."""

import math
from dataclasses import replace
from typing import Any

import pytest

from quadriga.errors import ModelError
from quadriga.server.models.families.architectures import read_architecture
from quadriga.server.models.formats.gguf_config import LONG_FACTORS, SHORT_FACTORS, make_config
from worker_proc.models.decoder import rope_frequencies

ATTENTION_FACTOR = math.sqrt(1 + math.log(32) / math.log(4096))
LONG, SHORT = [1.0 + pair for pair in range(48)], [1.0] * 48
PHI_4_MINI = {
    "context_length": 131072,
    "rope.scaling.original_context_length": 4096,
    "embedding_length": 3072,
    "feed_forward_length": 8192,
    "block_count": 4,
    "attention.head_count": 24,
    "attention.head_count_kv": 8,
    "attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "rope.dimension_count": 96,
    "rope.freq_base": 10000.0,
    "attention.sliding_window": 262144,
    "rope.scaling.attn_factor": ATTENTION_FACTOR,
}
STARCODER2 = {
    "context_length": 16384,
    "embedding_length": 3072,
    "feed_forward_length": 12288,
    "block_count": 4,
    "attention.head_count": 24,
    "attention.head_count_kv": 2,
    "attention.layer_norm_epsilon": 9.999999747378752e-06,
    "rope.freq_base": 999999.4,
}


def config_of(
    architecture: str,
    values: dict[str, Any],
    divisors: dict[str, list[float]],
    tensors: tuple[str, ...] = (),
) -> dict[str, Any]:
    named = {f"{architecture}.{name}": value for name, value in values.items()}
    shapes = {"token_embd.weight": {"shape": [200064, 3072]}} | {key: {} for key in tensors}
    return make_config({"general.architecture": architecture, **named}, shapes, divisors)


def test_a_phi_4_mini_has_the_positions_and_sizes_of_its_checkpoint() -> None:
    divisors = {LONG_FACTORS: LONG, SHORT_FACTORS: SHORT}
    ours = read_architecture(config_of("phi3", PHI_4_MINI, divisors))
    published = {
        "model_type": "phi3",
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "num_attention_heads": 24,
        "num_hidden_layers": 4,
        "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"long_factor": LONG, "short_factor": SHORT, "type": "longrope"},
        "rope_theta": 10000.0,
        "sliding_window": 262144,
        "tie_word_embeddings": True,
        "vocab_size": 200064,
    }
    theirs = read_architecture(published)
    assert replace(ours, ropes=()) == replace(theirs, ropes=())
    (rope, *_), (expected, *_) = ours.ropes, theirs.ropes
    assert rope is not None and expected is not None
    for length in (4096, 4097):
        frequencies, factor = rope_frequencies(rope, length)
        expected_frequencies, expected_factor = rope_frequencies(expected, length)
        assert frequencies.tolist() == expected_frequencies.tolist()
        assert factor == expected_factor == ATTENTION_FACTOR


def test_a_phi_3_with_a_window_of_0_tokens_has_none() -> None:
    values = {**PHI_4_MINI, "attention.sliding_window": 0}
    ours = read_architecture(config_of("phi3", values, {LONG_FACTORS: LONG, SHORT_FACTORS: SHORT}))
    assert ours.windows == (None,) * 4


def test_long_factors_without_short_ones_are_refused() -> None:
    with pytest.raises(ModelError, match=f"there is no {SHORT_FACTORS}"):
        config_of("phi3", PHI_4_MINI, {LONG_FACTORS: LONG})


def test_a_starcoder2_has_the_window_that_its_gguf_lacks() -> None:
    ours = read_architecture(config_of("starcoder2", STARCODER2, {}, ("blk.0.attn_q.bias",)))
    assert ours.windows == (4096,) * 4
    assert (ours.qkv_bias, ours.out_bias, ours.mlp_bias) == (True, True, True)
    assert (ours.norm, ours.norm_eps, ours.activation) == ("layer", 1e-05, "gelu_tanh")
    assert (ours.num_kv_heads, ours.head_dim, ours.tie_word_embeddings) == (2, 128, True)
