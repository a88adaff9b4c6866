"""The metadata of a Gemma's GGUF become the config.json of the checkpoint it was made from."""

from typing import Any

import pytest

from quadriga.server.models.families.architectures import read_architecture
from quadriga.server.models.families.decoder_config import DecoderConfig, RopeScaling
from quadriga.server.models.formats.gguf_config import make_config

TENSORS = {"token_embd.weight": {"shape": [262144, 640]}}


def metadata(architecture: str, **values: Any) -> dict[str, Any]:
    """Return what llama.cpp's converter writes for Gemma 3 270M, and `values`."""
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
        **values,
    }
    named = {f"{architecture}.{name}": value for name, value in own.items()}
    return {
        "general.architecture": architecture,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        **named,
    }


def config_of(architecture: str, **values: Any) -> DecoderConfig:
    return read_architecture(make_config(metadata(architecture, **values), TENSORS, {}))


def rope_of(config: DecoderConfig, local: bool) -> RopeScaling:
    """Return the rotary positions of the layers with a window, or of those without."""
    layer = next(i for i, window in enumerate(config.windows) if (window is not None) == local)
    rope = config.ropes[layer]
    assert rope is not None
    return rope


def test_a_gemma_3_has_a_window_in_five_layers_of_six_and_two_rope_bases() -> None:
    config = config_of("gemma3", **{"rope.freq_base": 1000000.0})
    assert config.windows == (*(512,) * 5, None) * 3
    whole, local = rope_of(config, local=False), rope_of(config, local=True)
    assert (whole.parameters["rope_theta"], whole.kind) == (1e6, "default")
    assert (local.parameters["rope_theta"], local.kind) == (1e4, "default")
    assert config.attention_scale == 1 / 16
    assert config.attention_softcap is None and config.logit_softcap is None
    assert (config.vocab_size, config.head_dim, config.num_kv_heads) == (262144, 256, 1)
    assert config.norm_eps == 1e-6 and config.tie_word_embeddings


def test_the_positions_of_layers_with_a_window_are_not_scaled() -> None:
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    config = config_of("gemma3", **{"rope.freq_base": 1000000.0, **scaling})
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
    assert config_of("gemma3", block_count=4, **values).windows == expected


def test_a_gemma_2_has_soft_caps_and_a_window_in_every_second_layer() -> None:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    config = config_of("gemma2", block_count=4, **caps)
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
    config = config_of(architecture, block_count=num_layers, **sizes)
    assert config.attention_scale == 144**-0.5
