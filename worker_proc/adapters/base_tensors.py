"""Tensors of the base's checkpoint that an adapter needs, such as those that it replaces.

They are read again, as an engine keeps its weights in a form of its own.
"""

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from quadriga.errors import ModelError
from quadriga.server.models.families.decoder_config import DecoderConfig
from quadriga.server.models.resolve import ModelFiles
from worker_proc.loading.loader import read_stored, shown_names
from worker_proc.models.base import plain_name
from worker_proc.models.quantized_weights import StackedRows

# Takes a tensor as it is stored, dequantized to float32.
TakesTensor = Callable[[Tensor], None]


class BaseTensors:
    """Collects which tensors are needed, then reads them one at a time."""

    def __init__(self, files: ModelFiles, config: DecoderConfig) -> None:
        self._files, self._config = files, config
        self._needed: dict[str, list[TakesTensor]] = defaultdict(list)

    def need(self, name: str, take: TakesTensor) -> None:
        """Let `take` be called by `read` with a tensor. name: as it is stored."""
        self._needed[plain_name(self._config, name)].append(take)

    def read(self) -> None:
        """Read all needed tensors.

        Raises:
            ModelError: a file cannot be read or lacks a tensor, or the weights are random ones.
        """
        if not self._needed:
            return
        if self._files.weights is None:
            raise ModelError(
                "it needs weights of its base (for DoRA, modules_to_save or biases), and those of"
                f" {self._files.name} are random: start without --load-format dummy"
            )
        missing = set(self._needed)
        stored = read_stored(self._files, torch.device("cpu"), True, self._is_needed)
        for name, tensor in stored:
            if isinstance(tensor, StackedRows):
                continue
            values = tensor.float() if isinstance(tensor, Tensor) else tensor.dense()
            for take in self._needed[plain_name(self._config, name)]:
                take(values)
            missing.discard(plain_name(self._config, name))
        if missing:
            raise ModelError(
                f"it changes {shown_names(sorted(missing))}, which {self._files.location} does not"
                " have: it was trained on another model"
            )

    def _is_needed(self, name: str) -> bool:
        return plain_name(self._config, name) in self._needed
