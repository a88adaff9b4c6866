"""What families read in config.json, and what they refuse."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from quadriga.errors import ModelError
from quadriga.server.models.families.architectures import read_architecture
from worker_proc.models.decoder import rope_frequencies

FAMILIES = [
    "olmo2",
    "olmo3",
    "granite",
    "smollm3",
    "gemma",
    "exaone4",
    "seed_oss",
    "ernie4_5",
    "helium",
]
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 1280,
    "intermediate_size": 100,
    "num_hidden_layers": 9,
    "num_attention_heads": 160,
    "max_position_embeddings": 256,
}

WINDOWS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2
LLAMA3 = {
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
# What differs from SIZES in a config.json that older releases of transformers wrote.
PUBLISHED: dict[str, dict[str, Any]] = {
    "OLMo-2-1124-7B": {
        "model_type": "olmo2",
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 500000,
    },
    "Olmo-3-7B": {
        "model_type": "olmo3",
        "layer_types": WINDOWS,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        "rope_theta": 500000,
        "sliding_window": 4096,
    },
    "granite-3.3-2b": {
        "model_type": "granite",
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "logits_scaling": 8.0,
        "residual_multiplier": 0.22,
        "rope_theta": 10000000.0,
        "tie_word_embeddings": True,
    },
    "SmolLM3-3B": {
        "model_type": "smollm3",
        "layer_types": ["full_attention"] * 8,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 2,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "gemma-2b": {
        "model_type": "gemma",
        "head_dim": 256,
        "hidden_act": "gelu",
        "hidden_activation": None,
        "num_key_value_heads": 1,
        "rope_theta": 10000.0,
    },
    "EXAONE-4.0-32B": {
        "model_type": "exaone4",
        "layer_types": WINDOWS,
        "num_key_value_heads": 8,
        "rope_scaling": LLAMA3,
        "rope_theta": 1000000,
        "sliding_window": 4096,
        "sliding_window_pattern": "LLLG",
    },
    "EXAONE-4.0-1.2B": {
        "model_type": "exaone4",
        "layer_types": ["full_attention"] * 8,
        "num_key_value_heads": 8,
        "rope_scaling": LLAMA3,
        "rope_theta": 1000000,
        "sliding_window": None,
        "sliding_window_pattern": None,
        "tie_word_embeddings": True,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_as_transformers_reads_it(name: str) -> None:
    published = {**SIZES, "num_hidden_layers": 8, **PUBLISHED[name]}
    fields = {key: value for key, value in published.items() if key != "model_type"}
    current = AutoConfig.for_model(published["model_type"], **deepcopy(fields)).to_dict()
    ours, theirs = read_architecture(published), read_architecture(current)
    assert without_ropes(ours) == without_ropes(theirs)
    for rope, expected in zip(ours.ropes, theirs.ropes, strict=True):
        if rope is None or expected is None:
            assert rope is expected
            continue
        frequencies, factor = rope_frequencies(rope, 4096)
        expected_frequencies, expected_factor = rope_frequencies(expected, 4096)
        torch.testing.assert_close(frequencies, expected_frequencies, rtol=0, atol=0)
        assert factor == expected_factor


@pytest.mark.parametrize("name", FAMILIES)
def test_missing_keys_have_the_defaults_of_transformers(name: str) -> None:
    theirs = AutoConfig.for_model(name, **SIZES).to_dict()
    ours = read_architecture({"model_type": name, **SIZES})
    assert without_ropes(ours) == without_ropes(read_architecture(theirs))
    assert thetas(ours) == thetas(read_architecture(theirs))


@pytest.mark.parametrize("name", ["olmo2", "granite", "smollm3", "gemma", "exaone4", "seed_oss"])
def test_older_keys_of_rotary_positions_are_read(name: str) -> None:
    old = {"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_theta": 500000.0, "rope_type": "linear", "factor": 2.0}
    of_old = read_architecture({"model_type": name, **SIZES, **old})
    of_new = read_architecture({"model_type": name, **SIZES, "rope_parameters": new})
    assert thetas(of_old) == thetas(of_new)
    assert {rope.number("factor") for rope in of_old.ropes if rope} == {2.0}


def test_only_the_layers_of_an_olmo3_without_a_window_have_scaled_positions() -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
    old = read_architecture({"model_type": "olmo3", **SIZES, "rope_scaling": yarn})
    parts = {"full_attention": yarn, "sliding_attention": {"rope_type": "default"}}
    new = read_architecture({"model_type": "olmo3", **SIZES, "rope_parameters": parts})
    kinds = ["yarn" if layer in (3, 7) else "default" for layer in range(9)]
    for config in (old, new):
        assert [rope.kind for rope in config.ropes if rope] == kinds
        assert [window is None for window in config.windows] == [kind == "yarn" for kind in kinds]


def test_an_exaone4_without_windows_rotates_in_every_layer() -> None:
    config = read_architecture({"model_type": "exaone4", **SIZES, "sliding_window": None})
    assert config.windows == (None,) * 9
    assert None not in config.ropes


def test_a_smollm3_may_list_the_layers_that_rotate() -> None:
    flags = [1, 0, 0, 1, 1, 1, 1, 1, 0]
    changes = {"no_rope_layers": flags, "use_sliding_window": True, "sliding_window": 20}
    config = read_architecture({"model_type": "smollm3", **SIZES, **changes})
    assert [int(rope is not None) for rope in config.ropes] == flags
    assert config.windows == tuple(None if flag else 20 for flag in flags)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("olmo3", {"layer_types": ["full_attention"]}, "layer_types = .* for each of the 9 layers"),
        ("olmo3", {"layer_types": ["chunked_attention"] * 9}, "supported: full_attention or"),
        ("olmo3", {"rope_parameters": {"rope_theta": 1.0}}, "rope_theta in rope_parameters"),
        ("olmo3", {"rope_scaling": {"type": "yarn"}}, "type = 'yarn' in rope_scaling"),
        ("gemma3_text", {"rope_parameters": {"factor": 2.0}}, "factor in rope_parameters"),
        ("gemma3_text", {"rope_scaling": {"type": "linear"}}, "type = 'linear' in rope_scaling"),
        ("llama", {"rope_parameters": {"full_attention": {}}}, "full_attention in rope_parameters"),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 5}, "chooses 5 of 4 experts"),
        ("llama", {"is_causal": False}, "is_causal = False; supported: True"),
        ("llama", {"per_layer_config": {"0": {}}}, "per_layer_config = .*; supported: None"),
        (
            "llama",
            {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "partial_rotary_factor = 0.5 together with rope_type = 'linear'",
        ),
        ("gptj", {"n_embd": 64, "n_head": 8, "rotary_dim": 64}, "rotary_dim = 64; heads have 8"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "2 values in no_rope_layers"),
        ("exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern = 'LLLG'"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
    ],
)
def test_what_is_not_supported_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_architecture({"model_type": name, **SIZES, **changes})


def without_ropes(config: Any) -> Any:
    return replace(config, ropes=())


def thetas(config: Any) -> list[tuple[str, float] | None]:
    return [rope and (rope.kind, rope.number("rope_theta")) for rope in config.ropes]
