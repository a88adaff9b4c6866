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
from worker_proc.models.base import checkpoint_parts, part_names, plain_name
from worker_proc.models.quantized_weights import StackedRows

CPU = torch.device("cpu")
TakesTensor = Callable[[Tensor], None]


class BaseTensors:
    """Collects which tensors are needed, then reads them one at a time."""

    def __init__(self, files: ModelFiles, config: DecoderConfig) -> None:
        self._files, self._config = files, config
        self._needed: dict[str, list[TakesTensor]] = defaultdict(list)

    def need(self, name: str, take: TakesTensor) -> None:
        """Let `read` call `take` with a tensor.

        Args:
            name: as `checkpoint_parts` yields it: of a part of a fused matrix, that of the part.
            take: is given the tensor dequantized to float32, a weight as [outputs, inputs].
        """
        self._needed[name].append(take)

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
        for stored_name, stored in read_stored(self._files, CPU, True, self._is_needed):
            if isinstance(stored, StackedRows):
                continue
            for name, tensor in checkpoint_parts(self._config, stored_name, stored):
                if name in self._needed:
                    values = tensor.float() if isinstance(tensor, Tensor) else tensor.dense()
                    for take in self._needed[name]:
                        take(values)
                    missing.discard(name)
        if missing:
            raise ModelError(
                f"it changes {shown_names(sorted(missing))}, which {self._files.location} does not"
                " have: it was trained on another model"
            )

    def _is_needed(self, stored_name: str) -> bool:
        name, _, kind = plain_name(self._config, stored_name).rpartition(".")
        return any(f"{part}.{kind}" in self._needed for part in part_names(self._config, name))
