"""What every architecture offers to the rest of the worker."""

from abc import abstractmethod
from typing import Any

from torch import Tensor, nn

from quadriga.errors import ConfigError, ModelError
from worker_proc.attention.base import AttentionShape
from worker_proc.models.ops import Ops, Value


class Model(nn.Module):
    """A decoder over a flat row of tokens, which may belong to many requests.

    It is built with storage for its weights, then filled through `checkpoint_tensors`, then
    finished.
    """

    attention_shape: AttentionShape
    vocab_size: int

    @abstractmethod
    def forward(self, ops: Ops[Value]) -> Value:
        """The step's tokens to hidden states [tokens, hidden]."""

    @abstractmethod
    def compute_logits(self, ops: Ops[Value], hidden: Value) -> Value:
        """Some rows of hidden states [rows, hidden] to logits [rows, vocab_size]."""

    @abstractmethod
    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """The names of a checkpoint's tensors, and for each the view of a parameter that it fills:
        a part of a fused one, or a transposed one."""

    @abstractmethod
    def map_weight_name(self, name: str) -> str | None:
        """A checkpoint's name as `checkpoint_tensors` has it; None for one that is not needed."""

    def finish_loading(self, context_length: int) -> None:
        """Work out what does not come from the checkpoint, for positions below context_length."""


def setting(config: dict[str, Any], key: str, default: Any = None) -> Any:
    """A value of config.json; ModelError where it is missing and has no default."""
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"the model's config.json has no {key!r}")
    return value


def require(config: dict[str, Any], key: str, allowed: tuple[Any, ...]) -> None:
    """ModelError where config.json asks for what this architecture's file does not do. An absent
    key means the first of `allowed`."""
    value = config.get(key, allowed[0])
    if value not in allowed:
        shown = ", ".join(repr(choice) for choice in allowed)
        raise ModelError(f"the model's config.json has {key} = {value!r}; supported: {shown}")


def check_shares(count: int, **numbers: int) -> None:
    """ConfigError where so many ranks cannot have equal shares of each of a model's numbers."""
    uneven = [name for name, number in numbers.items() if number % count]
    if not uneven:
        return
    possible = [n for n in range(1, max(numbers.values()) + 1)
                if not any(number % n for number in numbers.values())]  # fmt: skip
    shown = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in numbers.items())
    raise ConfigError(
        f"tp is {count}: it must divide the model's {shown}; possible: "
        + ", ".join(map(str, possible))
    )
