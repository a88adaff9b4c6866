"""The windows of a config.json are those of transformers."""

from typing import Any

import pytest

from quadriga.server.models.families.windows import common_window, mistral_windows, qwen_windows


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sliding_window": 100},
        {"sliding_window": None, "use_sliding_window": True},
        {"sliding_window": 100, "use_sliding_window": True},
        {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 0},
        {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 2},
        {
            "sliding_window": 100,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ],
)
@pytest.mark.parametrize("kind", ["Qwen2Config", "Qwen3Config"])
def test_the_windows_of_a_qwen(kind: str, fields: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, kind)(num_hidden_layers=3, **fields)
    expected = tuple(
        config.sliding_window if kind == "sliding_attention" else None
        for kind in config.layer_types
    )
    assert qwen_windows(fields, 3) == expected


@pytest.mark.parametrize("fields", [{}, {"sliding_window": 100}, {"sliding_window": None}])
def test_the_windows_of_a_mistral(fields: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    window = transformers.MistralConfig(**fields).sliding_window
    assert mistral_windows(fields, 2) == (window, window)


def test_a_model_has_a_window_where_no_layer_sees_all() -> None:
    assert common_window(()) == 0
    assert common_window((8, 8)) == 8
    assert common_window((8, 12)) == 12
    assert common_window((8, None)) == 0
