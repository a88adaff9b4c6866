"""The metadata of a variant of Llama become the config.json that the GGUF was made from."""

from dataclasses import replace
from typing import Any

import pytest

from quadriga.errors import ModelError
from quadriga.server.models.families.architectures import read_architecture
from quadriga.server.models.formats.gguf_config import make_config

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
    "vocab_size": 512,
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


def config_of(architecture: str, values: dict[str, Any]) -> Any:
    named = {f"{architecture}.{name}": value for name, value in (METADATA | values).items()}
    tensors = {"token_embd.weight": {"shape": [512, 96]}}
    metadata = {"general.architecture": architecture, **named}
    return read_architecture(make_config(metadata, tensors, {}))


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
    ours = config_of(architecture, values)
    theirs = read_architecture({"model_type": architecture, **SIZES, **published})
    assert replace(ours, ropes=()) == replace(theirs, ropes=())
    thetas = [
        [rope and rope.number("rope_theta") for rope in config.ropes] for config in (ours, theirs)
    ]
    assert thetas[0] == thetas[1]


def test_a_granite_without_a_factor_of_its_logits_is_incomplete() -> None:
    with pytest.raises(KeyError, match="logit_scale"):
        config_of("granite", {})


def test_other_factors_of_a_granite_have_the_values_that_llama_cpp_takes() -> None:
    config = config_of("granite", {"logit_scale": 8.0})
    assert config.attention_scale == pytest.approx(config.head_dim**-0.5)
    assert (config.embedding_scale, config.residual_scale) == (1.0, 1.0)


def test_an_olmo_3_has_the_architecture_of_an_olmo_2_and_is_refused() -> None:
    with pytest.raises(ModelError, match="is of an Olmo 3"):
        config_of("olmo2", {"attention.sliding_window": 4096})
