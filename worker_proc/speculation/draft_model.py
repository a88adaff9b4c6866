"""The model in 4 bits that drafts tokens for itself."""

import logging
from copy import deepcopy

import torch
from torch import nn

from quadriga.config.server_config import ServerConfig
from quadriga.errors import ConfigError
from worker_proc.models.base import Model
from worker_proc.models.layers import Embedding, Linear

DRAFT_BITS = 4
DRAFT_WEIGHT_BITS = 5  # with the scale and minimum of each group
MB = 1_000_000
_CONTAINERS = (nn.Module, dict, list)


def wants_draft(config: ServerConfig, device: torch.device, has_native_kernels: bool) -> bool:
    """Return whether the flags ask for a draft.

    Raises:
        ConfigError: They do, and the native kernels of a CPU do not compute the model.
    """
    if config.scheduler.speculative_method != "self":
        return False
    if not has_native_kernels:
        other = "auto" if device.type == "cpu" else "ngram"
        raise ConfigError(
            "speculative_method self drafts with the native kernels of a CPU, which do not compute"
            f" this model on {device}: take --speculative-method {other}"
        )
    return True


def draft_bytes(model: Model) -> int:
    """Return the memory that the draft's weights will take, and log it.

    Raises:
        ConfigError: The model's weights have few bits already.
    """
    for layer in model.modules():
        if isinstance(layer, Linear | Embedding) and (layer.blocks or layer.coded):
            raise ConfigError(
                "speculative_method self drafts with 4 bits, and the weights of this model are"
                " quantized already: take --speculative-method auto"
            )
    num_bytes = sum(values.numel() for values in model.parameters()) * DRAFT_WEIGHT_BITS // 8
    logging.info("draft in %d bits: %.0f MB beside the weights", DRAFT_BITS, num_bytes / MB)
    return num_bytes


def same_weights(model: Model) -> Model:
    """Return a copy of the layers that shares their weights, for an engine that takes them."""
    shared: dict[int, object] = {id(weight): weight for weight in model.parameters()}
    for module in model.modules():  # what else is not a layer needs no copy either
        values = vars(module).values()
        shared |= {id(value): value for value in values if not isinstance(value, _CONTAINERS)}
    copy: Model = deepcopy(model, shared)
    return copy
