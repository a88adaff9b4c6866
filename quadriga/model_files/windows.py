"""Sliding windows in a config.json: how many tokens each layer's attention is limited to."""

from collections.abc import Iterable
from typing import Any

DEFAULT_WINDOW = 4096  # of Mistral and Qwen, where config.json has no sliding_window
DEFAULT_FULL_LAYERS = 28  # of Qwen, where config.json has no max_window_layers

Windows = tuple[int | None, ...]


def mistral_windows(config: dict[str, Any], num_layers: int) -> Windows:
    """Return the window of each layer, in tokens; None: the layer sees all."""
    window = config.get("sliding_window", DEFAULT_WINDOW)
    return (None if window is None else int(window),) * num_layers


def qwen_windows(config: dict[str, Any], num_layers: int) -> Windows:
    """Return the window of each layer of a Qwen 2 or 3: by default the first layers see all."""
    window = config.get("sliding_window", DEFAULT_WINDOW)
    if window is None or not config.get("use_sliding_window", False):
        return (None,) * num_layers
    num_full = int(config.get("max_window_layers", DEFAULT_FULL_LAYERS))
    kinds = config.get("layer_types") or [
        "full_attention" if layer < num_full else "sliding_attention" for layer in range(num_layers)
    ]
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


# By model type. Other architectures have no windows, whatever config.json says.
LAYER_WINDOWS = {"mistral": mistral_windows, "qwen2": qwen_windows, "qwen3": qwen_windows}


def common_window(windows: Iterable[int | None], context_length: int) -> int:
    """Return how many tokens, itself included, a token of a model sees at most; 0: all.

    Args:
        windows: the window of each layer; None or 0: the layer sees all.
        context_length: tokens of the longest request, which a longer window does not limit.
    """
    all_windows = [window or context_length for window in windows]
    window = max(all_windows, default=context_length)
    return window if window < context_length else 0
