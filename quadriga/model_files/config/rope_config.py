"""Read the rotary positions of a config.json, without torch."""

from dataclasses import dataclass
from typing import Any

from quadriga.errors import ModelError
from quadriga.model_files.config.config_values import setting

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
DEFAULT_THETA = 10000.0


def rope_values(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json's values of rotary positions, which have two names.

    As in transformers, the older name, `rope_scaling`, replaces all of the other one's values.
    """
    return dict(config.get("rope_scaling") or config.get("rope_parameters") or {})


def configs_by_layer(
    config: dict[str, Any], thetas: tuple[float, float]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config.json as it is for layers without a window, and for layers with one.

    `rope_scaling` is of the layers without a window; `rope_parameters` has a part for each kind.

    Args:
        config: config.json.
        thetas: `rope_theta` of both kinds, where their values have none.

    Raises:
        ModelError: `rope_parameters` has something beside the two parts, or `rope_scaling` names
            its type by the older key, which transformers does not read here.
    """
    scaling = config.get("rope_scaling") or {}
    if "type" in scaling and "rope_type" not in scaling:
        raise ModelError(
            f"the model's config.json has type = {scaling['type']!r} in rope_scaling; supported for"
            " this model_type: the name rope_type"
        )
    parts = config.get("rope_parameters") or {}
    if unknown := parts.keys() - {"full_attention", "sliding_attention"}:
        raise ModelError(
            f"the model's config.json has {', '.join(sorted(unknown))} in rope_parameters;"
            " supported: full_attention and sliding_attention"
        )
    full = (parts.get("full_attention") or {}) | scaling
    sliding = parts.get("sliding_attention") or {}
    shared = config | {"rope_scaling": None, "original_max_position_embeddings": None}
    return (
        shared | {"rope_parameters": {"rope_theta": thetas[0], **full}},
        shared | {"rope_parameters": {"rope_theta": thetas[1], **sliding}},
    )


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Rotary positions of a checkpoint; worker_proc/models/rope_scaling.py computes them.

    Attributes:
        head_dim: Channels of a head that are rotated, the first ones.
        max_length: `max_position_embeddings` in tokens; 0 if config.json has none.
        parameters: `rope_parameters` with `rope_type` and `rope_theta`.
    """

    head_dim: int
    max_length: int
    parameters: dict[str, Any]

    @classmethod
    def from_hf(
        cls, config: dict[str, Any], head_dim: int, may_be_partial: bool = False
    ) -> "RopeScaling":
        """Read config.json.

        Args:
            config: config.json.
            head_dim: Channels of a head.
            may_be_partial: The family rotates a part of each head if config.json says so. Others
                ignore `partial_rotary_factor`.

        Raises:
            ModelError: The type of scaling is not supported, or not for a part of a head.
        """
        parameters = rope_values(config)
        if nested := [key for key, value in parameters.items() if isinstance(value, dict)]:
            raise ModelError(
                f"the model's config.json has {', '.join(nested)} in rope_parameters; supported for"
                " this model_type: one set of values for all layers"
            )
        theta = parameters.get("rope_theta") or config.get("rope_theta") or DEFAULT_THETA
        parameters["rope_theta"] = theta
        parameters["rope_type"] = parameters.get("rope_type") or parameters.get("type") or "default"
        max_length = int(config.get("max_position_embeddings") or 0)
        original = (
            config.get("original_max_position_embeddings")
            or parameters.get("original_max_position_embeddings")
            or max_length
        )
        parameters["original_max_position_embeddings"] = original or None
        if parameters["rope_type"] not in ROPE_KINDS:
            raise ModelError(
                f"the model's config.json has rope_type = {parameters['rope_type']!r}; supported: "
                + ", ".join(ROPE_KINDS)
            )
        part = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        num_rotated = int(head_dim * (1.0 if part is None else part))
        if not may_be_partial:
            if num_rotated != head_dim and parameters["rope_type"] != "default":
                raise ModelError(
                    f"the model's config.json has partial_rotary_factor = {part} together with"
                    f" rope_type = {parameters['rope_type']!r}; supported for this model_type: 1"
                )
            num_rotated = head_dim
        return cls(num_rotated, max_length, parameters)

    @property
    def kind(self) -> str:
        """The `rope_type`, one of ROPE_KINDS."""
        return str(self.parameters["rope_type"])

    @property
    def original_length(self) -> int:
        """The context length of the pretraining, in tokens."""
        return int(setting(self.parameters, "original_max_position_embeddings"))

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number of `parameters`, or `default` if it is missing or null."""
        return float(setting(self.parameters, name, default))

    def extension(self) -> float:
        """Return `factor`, or by how much the maximal context exceeds the original one."""
        return self.number("factor", self.max_length / self.original_length)
