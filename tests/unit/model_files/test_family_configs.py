"""What families read in config.json, and what they refuse."""

from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig

from quadriga.errors import ModelError
from quadriga.model_files.architectures import read_architecture

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
