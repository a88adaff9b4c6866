"""The contract of a model architecture, and helpers to read its config.json."""

from abc import abstractmethod
from typing import Any

from torch import Tensor, nn

from quadriga.errors import ConfigError, ModelError
from worker_proc.attention.base import AttentionShape
from worker_proc.models.ops import Ops, Value


class Model(nn.Module):
    """A decoder over the concatenated tokens of a step, which may belong to many requests.

    The constructor allocates the weights; the loader fills the tensors of `checkpoint_tensors` and
    then calls `finish_loading`.

    Attributes:
        attention_shape: Layers, heads and head size of this rank.
        vocab_size: Number of columns of the logits.
    """

    attention_shape: AttentionShape
    vocab_size: int

    @abstractmethod
    def forward(self, ops: Ops[Value]) -> Value:
        """Return the hidden states [tokens, hidden_size] of the step's tokens."""

    @abstractmethod
    def compute_logits(self, ops: Ops[Value], hidden: Value) -> Value:
        """Return the logits [rows, vocab_size] of hidden states [rows, hidden_size]."""

    @abstractmethod
    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return the view of a parameter that each tensor of the checkpoint fills, by its name.

        A view can be a row range of a fused weight, or a transposed weight.
        """

    @abstractmethod
    def map_weight_name(self, name: str) -> str | None:
        """Return the key of `checkpoint_tensors` for a name in the file; None to skip it."""

    def finish_loading(self, context_length: int) -> None:
        """Compute the constants that no checkpoint has, for positions below `context_length`."""


def setting(config: dict[str, Any], key: str, default: Any = None) -> Any:
    """Return a value of config.json, or `default` if it is missing or null.

    Raises:
        ModelError: It is missing and there is no default.
    """
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"the model's config.json has no {key!r}")
    return value


def require(config: dict[str, Any], key: str, allowed: tuple[Any, ...]) -> None:
    """Raise ModelError if config.json has a value that is not `allowed`.

    A missing key stands for the first of `allowed`.
    """
    value = config.get(key, allowed[0])
    if value not in allowed:
        shown = ", ".join(repr(choice) for choice in allowed)
        raise ModelError(f"the model's config.json has {key} = {value!r}; supported: {shown}")


def check_tp_size(tp_size: int, **sizes: int) -> None:
    """Raise ConfigError if one of the model's `sizes` is not divisible by `tp_size`."""
    if not any(size % tp_size for size in sizes.values()):
        return
    possible = [n for n in range(1, max(sizes.values()) + 1)
                if not any(size % n for size in sizes.values())]  # fmt: skip
    shown = ", ".join(f"{size} {name.replace('_', ' ')}" for name, size in sizes.items())
    raise ConfigError(
        f"tp is {tp_size}: it must divide the model's {shown}; possible: "
        + ", ".join(map(str, possible))
    )
