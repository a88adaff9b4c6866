"""The metadata of a GGUF become the config.json of the checkpoint it was made from."""

import math
from dataclasses import replace
from typing import Any

import pytest

from quadriga.errors import ModelError
from quadriga.server.models.families.architectures import read_architecture
from quadriga.server.models.families.decoder_config import DecoderConfig, RopeScaling
from quadriga.server.models.formats.gguf_config import LONG_FACTORS, SHORT_FACTORS, make_config
from worker_proc.models.decoder import rope_frequencies

NUM_IDS = 512
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
    divisors: dict[str, list[float]] | None = None,
    tensors: tuple[str, ...] = (),
) -> DecoderConfig:
    """Return what is made of an architecture's metadata, its divisors and the names of tensors."""
    metadata = {f"{architecture}.{name}": value for name, value in values.items()}
    metadata["general.architecture"] = architecture
    shapes = {"token_embd.weight": {"shape": [NUM_IDS, 96]}} | {name: {} for name in tensors}
    return read_architecture(make_config(metadata, shapes, divisors or {}))


def test_a_phi_4_mini_has_the_positions_and_sizes_of_its_checkpoint() -> None:
    divisors = {LONG_FACTORS: LONG, SHORT_FACTORS: SHORT}
    ours = config_of("phi3", PHI_4_MINI, divisors)
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
        "vocab_size": NUM_IDS,
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
    ours = config_of("phi3", values, {LONG_FACTORS: LONG, SHORT_FACTORS: SHORT})
    assert ours.windows == (None,) * 4


def test_long_factors_without_short_ones_are_refused() -> None:
    with pytest.raises(ModelError, match=f"there is no {SHORT_FACTORS}"):
        config_of("phi3", PHI_4_MINI, {LONG_FACTORS: LONG})


def test_a_starcoder2_has_the_window_that_its_gguf_lacks() -> None:
    ours = config_of("starcoder2", STARCODER2, tensors=("blk.0.attn_q.bias",))
    assert ours.windows == (4096,) * 4
    assert (ours.qkv_bias, ours.out_bias, ours.mlp_bias) == (True, True, True)
    assert (ours.norm, ours.norm_eps, ours.activation) == ("layer", 1e-05, "gelu_tanh")
    assert (ours.num_kv_heads, ours.head_dim, ours.tie_word_embeddings) == (2, 128, True)


# --- Gemma ----------------------------------------------------------------------------------------


def gemma(architecture: str, **values: Any) -> DecoderConfig:
    """Return what is made of the metadata of Gemma 3 270M, and `values`."""
    own = {
        "context_length": 32768,
        "embedding_length": 640,
        "block_count": 18,
        "feed_forward_length": 2048,
        "attention.head_count": 4,
        "attention.head_count_kv": 1,
        "attention.layer_norm_rms_epsilon": 9.999999974752427e-07,
        "attention.key_length": 256,
        "attention.value_length": 256,
        "attention.sliding_window": 512,
    }
    return config_of(architecture, own | values)


def rope_of(config: DecoderConfig, local: bool) -> RopeScaling:
    """Return the rotary positions of the layers with a window, or of those without."""
    layer = next(i for i, window in enumerate(config.windows) if (window is not None) == local)
    rope = config.ropes[layer]
    assert rope is not None
    return rope


def test_a_gemma_3_has_a_window_in_five_layers_of_six_and_two_rope_bases() -> None:
    config = gemma("gemma3", **{"rope.freq_base": 1000000.0})
    assert config.windows == (*(512,) * 5, None) * 3
    whole, local = rope_of(config, local=False), rope_of(config, local=True)
    assert (whole.parameters["rope_theta"], whole.kind) == (1e6, "default")
    assert (local.parameters["rope_theta"], local.kind) == (1e4, "default")
    assert config.attention_scale == 1 / 16
    assert config.attention_softcap is None and config.logit_softcap is None
    assert (config.vocab_size, config.head_dim, config.num_kv_heads) == (NUM_IDS, 256, 1)
    assert config.norm_eps == 1e-6 and config.tie_word_embeddings


def test_the_positions_of_layers_with_a_window_are_not_scaled() -> None:
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    config = gemma("gemma3", **{"rope.freq_base": 1000000.0, **scaling})
    whole = rope_of(config, local=False)
    assert (whole.kind, whole.parameters["factor"]) == ("linear", 8.0)
    assert whole.parameters["rope_theta"] == 1e6
    assert rope_of(config, local=True).kind == "default"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [(3, (512, 512, None, 512)), ([False, True, True, False], (None, 512, 512, None))],
)
def test_the_header_may_say_which_layers_have_a_window(
    pattern: int | list[bool], expected: tuple[int | None, ...]
) -> None:
    values = {"attention.sliding_window_pattern": pattern}
    assert gemma("gemma3", block_count=4, **values).windows == expected


def test_a_gemma_2_has_soft_caps_and_a_window_in_every_second_layer() -> None:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    config = gemma("gemma2", block_count=4, **caps)
    assert config.windows == (512, None, 512, None)
    assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)
    assert rope_of(config, local=False).parameters["rope_theta"] == 1e4
    assert rope_of(config, local=True) == rope_of(config, local=False)


@pytest.mark.parametrize(("architecture", "num_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_models_scale_scores_by_the_width_of_a_head(
    architecture: str, num_layers: int
) -> None:
    sizes = {
        "embedding_length": 4608,
        "attention.head_count": 32,
        "attention.key_length": 128,
        "attention.value_length": 128,
    }
    config = gemma(architecture, block_count=num_layers, **sizes)
    assert config.attention_scale == 144**-0.5


# --- variants of Llama ----------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "max_position_embeddings": 256,
    "vocab_size": NUM_IDS,
    "tie_word_embeddings": True,
}
METADATA: dict[str, Any] = {
    "embedding_length": 96,
    "feed_forward_length": 160,
    "block_count": 5,
    "attention.head_count": 6,
    "attention.head_count_kv": 2,
    "attention.key_length": 24,
    "attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "rope.freq_base": 50000.0,
    "context_length": 256,
}
GRANITE = {
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
GRANITE_METADATA = {
    "attention.scale": 0.015625,
    "embedding_scale": 12.0,
    "residual_scale": 0.2199999988079071,
    "logit_scale": 8.0,
}


@pytest.mark.parametrize(
    ("architecture", "values", "published"),
    [
        ("gemma", {}, {}),
        ("granite", GRANITE_METADATA, GRANITE),
        ("olmo2", {}, {}),
        ("smollm3", {}, {}),
    ],
)
def test_a_header_says_what_config_json_says(
    architecture: str, values: dict[str, Any], published: dict[str, Any]
) -> None:
    ours = config_of(architecture, METADATA | values)
    theirs = read_architecture({"model_type": architecture, **SIZES, **published})
    assert replace(ours, ropes=()) == replace(theirs, ropes=())
    thetas = [
        [rope and rope.number("rope_theta") for rope in config.ropes] for config in (ours, theirs)
    ]
    assert thetas[0] == thetas[1]


def test_a_granite_without_a_factor_of_its_logits_is_incomplete() -> None:
    with pytest.raises(KeyError, match="logit_scale"):
        config_of("granite", METADATA)


def test_other_factors_of_a_granite_have_the_values_that_llama_cpp_takes() -> None:
    config = config_of("granite", METADATA | {"logit_scale": 8.0})
    assert config.attention_scale == pytest.approx(config.head_dim**-0.5)
    assert (config.embedding_scale, config.residual_scale) == (1.0, 1.0)


def test_an_olmo_3_has_the_architecture_of_an_olmo_2_and_is_refused() -> None:
    with pytest.raises(ModelError, match="is of an Olmo 3"):
        config_of("olmo2", METADATA | {"attention.sliding_window": 4096})
