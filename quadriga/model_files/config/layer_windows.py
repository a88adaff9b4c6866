"""Read the `layer_types` of a config.json: which layers have a window, without torch."""

from typing import Any

from quadriga.errors import ModelError
from quadriga.model_files.config.config_values import setting
from quadriga.windows import Windows

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_windows(config: dict[str, Any], default_types: list[str]) -> Windows:
    """Return the window of each layer, in tokens; None: the layer sees all.

    Args:
        config: config.json.
        default_types: `layer_types` if config.json has none.

    Raises:
        ModelError: A type of layer is not supported, or a layer has none.
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
    window = int(setting(config, "sliding_window"))
    return tuple(window if kind == SLIDING else None for kind in types)


def periodic_types(config: dict[str, Any], period: int) -> list[str]:
    """Return `layer_types` in which every `period`-th layer sees all."""
    numbers = range(1, setting(config, "num_hidden_layers") + 1)
    return [SLIDING if number % period else FULL for number in numbers]
