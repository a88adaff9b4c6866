"""Read the rotary positions of a config.json, without torch."""

from dataclasses import dataclass
from typing import Any

from quadriga.errors import ModelError
from quadriga.model_files.config.config_values import setting

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
DEFAULT_THETA = 10000.0


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
    def from_hf(cls, config: dict[str, Any], head_dim: int) -> "RopeScaling":
        """Read config.json. Raise ModelError if the type of scaling is not supported."""
        parameters: dict[str, Any] = {"rope_theta": config.get("rope_theta") or DEFAULT_THETA}
        parameters |= config.get("rope_scaling") or {}
        parameters |= config.get("rope_parameters") or {}
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
        return cls(int(head_dim * (1.0 if part is None else part)), max_length, parameters)

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
