"""Sliding windows: the tokens that a layer's attention is limited to, and the pages of these."""

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


def common_window(windows: Iterable[int | None]) -> int:
    """Return the tokens that every layer's attention is limited to; 0 if a layer sees all.

    Args:
        windows: the window of each layer, in tokens; None: the layer sees all.
    """
    known = list(windows)
    return max((window or 0 for window in known), default=0) if all(known) else 0


def num_seen_pages(window: int, page_size: int) -> int:
    """Return the number of KV pages before its own that the first token of a page sees.

    It is at least 1, as the prefix tree needs the page before as a parent.
    """
    return max(1, -(-(window - 1) // page_size))
