"""Sliding windows: the tokens that a layer's attention is limited to, and the pages of these.

The second part reads which layers of a config.json have a window.
"""

from collections.abc import Iterable
from typing import Any

from quadriga.errors import ModelError
from quadriga.server.models.families.config_values import setting

Windows = tuple[int | None, ...]


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


FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT_WINDOW = 4096  # of Mistral and Qwen, where config.json has no sliding_window
DEFAULT_FULL_LAYERS = 28  # of Qwen, where config.json has no max_window_layers


def layer_windows(
    config: dict[str, Any], default_types: list[str], default_window: int | None = None
) -> Windows:
    """Return the window of each layer, in tokens; None: the layer sees all.

    Args:
        config: config.json.
        default_types: `layer_types` if config.json has none.
        default_window: `sliding_window` if config.json has none.

    Raises:
        ModelError: a type of layer is not supported, or a layer has none.
    """
    num_layers = int(setting(config, "num_hidden_layers"))
    types = config.get("layer_types") or default_types
    if len(types) != num_layers or set(types) - {FULL, SLIDING}:
        raise ModelError(
            f"the model's config.json has layer_types = {types}; supported: {FULL} or {SLIDING}"
            f" for each of the {num_layers} layers"
        )
    if SLIDING not in types:
        return (None,) * num_layers
    window = int(setting(config, "sliding_window", default_window))
    return tuple(window if kind == SLIDING else None for kind in types)


def periodic_types(config: dict[str, Any], period: int) -> list[str]:
    """Return `layer_types` in which every `period`-th layer sees all."""
    numbers = range(1, setting(config, "num_hidden_layers") + 1)
    return [SLIDING if number % period else FULL for number in numbers]


def mistral_windows(config: dict[str, Any], num_layers: int) -> Windows:
    """Return the window of each layer, in tokens; None: the layer sees all."""
    window = config.get("sliding_window", DEFAULT_WINDOW)
    return (None if window is None else int(window),) * num_layers


def qwen_windows(config: dict[str, Any], num_layers: int) -> Windows:
    """Return the window of each layer of a Qwen 2 or 3: by default the first layers see all."""
    window = config.get("sliding_window", DEFAULT_WINDOW)
    if window is None or not config.get("use_sliding_window", False):
        return (None,) * num_layers
    num_full = int(setting(config, "max_window_layers", DEFAULT_FULL_LAYERS))
    types = [FULL if layer < num_full else SLIDING for layer in range(num_layers)]
    sizes = {"num_hidden_layers": num_layers, "sliding_window": window}
    return layer_windows(config | sizes, types)
