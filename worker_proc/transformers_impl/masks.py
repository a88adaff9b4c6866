"""Recognize the mask that a model of transformers asks for: causal, or causal with a window.

transformers describes a mask as a function of indices (`masking_utils.py`). While a model is
probed, a registered mask function evaluates that description and passes its result to the layers,
in place of a mask.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Compares rows of this many queries with the window that the last query shows.
NUM_CHECKED_QUERIES = 64

# Returns whether a query sees a key, for the indexes (batch, head, query, key).
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class RecognizedMask:
    """Stands for an attention mask while a model is probed.

    Attributes:
        window: Number of last tokens that a token sees, itself included; None: all.
        is_known: Whether the mask is causal with that window.
    """

    window: int | None
    is_known: bool = True


def recognize_mask(sees: MaskFunction, context_length: int) -> RecognizedMask:
    """Return what a mask is for sequences of `context_length` tokens.

    Args:
        sees: The description of the mask.
        context_length: Tokens of the longest sequence; a window that is not shorter has no effect.
    """
    last = context_length - 1
    seen = _row(sees, last, context_length)
    window = int(seen.sum())
    step = max(1, context_length // NUM_CHECKED_QUERIES)
    queries = {last - 1, window - 1, window, *range(0, context_length, step)}
    keys = torch.arange(context_length)
    for query in sorted(query for query in queries if 0 <= query < context_length):
        expected = (keys <= query) & (keys > query - window)
        if not torch.equal(_row(sees, query, context_length), expected):
            return RecognizedMask(None, is_known=False)
    return RecognizedMask(None if window == context_length else window)


def _row(sees: MaskFunction, query: int, num_keys: int) -> Tensor:
    """Return `[num_keys]` which keys a query sees."""
    keys = torch.arange(num_keys)
    zeros = torch.zeros_like(keys)
    return torch.as_tensor(sees(zeros, zeros, zeros + query, keys)).expand(num_keys)


@contextmanager
def recognized_masks(name: str, context_length: int) -> Iterator[None]:
    """Let models with the attention implementation `name` pass RecognizedMask to their layers.

    Otherwise transformers makes no masks for it, as no mask function of this name is registered.
    """
    from transformers import AttentionMaskInterface

    def make_mask(*_: Any, mask_function: MaskFunction, **__: Any) -> RecognizedMask:
        return recognize_mask(mask_function, context_length)

    AttentionMaskInterface.register(name, make_mask)
    try:
        yield
    finally:
        del AttentionMaskInterface._global_mapping[name]
