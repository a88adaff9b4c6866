"""Attention of prompts by FlashInfer, in place of our Triton kernel.

Rows of one token stay with our kernel: FlashInfer's XQA was slower in every shape on
an H100 (26 November 2026: 1.05 to 1.4 times). So do short steps with prompts, which are graphs:
FlashInfer's class `BatchPrefillWithPagedKVCacheWrapper` is planned on the host. It reads our pages
in their form NHD.

Documented at https://docs.flashinfer.ai; written for flashinfer-python 0.6.14.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quadriga.errors import ConfigError
from worker_proc.gpu.pages import Launch, Pages, TritonAttention
from worker_proc.models.attention import Ints
from worker_proc.models.base import Model
from worker_proc.models.layers import Attention
from worker_proc.models.transfer import send_all
from worker_proc.step.inputs import StepInputs

HEAD_DIMS = (64, 128, 256)
MIN_CAPABILITY = (8, 0)
WORKSPACE_BYTES = 128 * 2**20
# A plan is copied from pinned memory, which must not change before: two steps may be outstanding.
NUM_PLANS = 3


def check_flashinfer(model: Model, device: torch.device) -> None:
    """Raise ConfigError if FlashInfer is not installed, or does not have what a model needs."""
    try:
        import flashinfer  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"attention_backend flashinfer needs the package flashinfer-python ({error}):"
            " pip install 'quadriga[flashinfer]', or start with --attention-backend triton"
        ) from None
    shape, layers = model.attention_shape, attention_layers(model)
    for is_missing, what in (
        (
            shape.head_dim not in HEAD_DIMS,
            f"a head_dim of {shape.head_dim}, but with one of {HEAD_DIMS}",
        ),
        (any(one.softcap is not None for one in layers), "a model that has attention soft caps"),
        (any(one.sinks is not None for one in layers), "a model that has attention sinks"),
        (_is_too_old(device), f"the compute capability of {device}, but from 8.0 on"),
    ):
        if is_missing:
            raise ConfigError(
                f"attention_backend flashinfer does not work with {what}: start with"
                " --attention-backend triton"
            )


def _is_too_old(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) < MIN_CAPABILITY


def attention_layers(model: Model) -> list[Attention]:
    """Return the attention of every layer."""
    return [module for module in model.modules() if isinstance(module, Attention)]


@dataclass(frozen=True, slots=True)
class PromptLaunch(Launch):
    """Attention of prompts; `wrappers` have a plan of the step for each window of the model."""

    wrappers: dict[int, Any]

    def attend(
        self,
        q: Tensor,
        pool: Tensor,
        out: Tensor,
        attention: Attention,
        nonfinite_from: Tensor | None = None,
    ) -> None:
        wrapper = self.wrappers[_window_left(attention.window)]
        wrapper.run(q.contiguous(), (pool[0], pool[1]), out=out.view(q.shape))


def _window_left(window: int | None) -> int:
    """Return how many keys before its own a query sees; -1: all."""
    return -1 if window is None else window - 1


class FlashInferAttention(TritonAttention):
    """Launches FlashInfer for the prompts of steps that are no graphs."""

    def __init__(self, pages: Pages, model: Model, dtype: torch.dtype) -> None:
        from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

        super().__init__(pages, dtype, deterministic=False)
        device = pages.layers[0].device
        layers = attention_layers(model)
        windows = {_window_left(layer.window) for layer in layers}
        self._dtype, self._scale = dtype, layers[0].scale
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._plans = cycle(
            {left: BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD") for left in windows}
            for _ in range(NUM_PLANS)
        )

    def launch_prompts(
        self, inputs: StepInputs, num_single: int, blocks: Ints, on_device: Tensor
    ) -> Launch:
        layout, table = inputs.layout, inputs.table
        lengths = (layout.num_computed + layout.num_tokens)[num_single:]
        num_pages = -(-lengths // table.page_size)
        slots, columns = send_all(
            table.device, np.repeat(layout.slots[num_single:], num_pages), counted_within(num_pages)
        )
        wrappers = self._plan_prompts(
            layout.num_tokens[num_single:], lengths, num_pages, table.pages[slots, columns].int()
        )
        return PromptLaunch(num_single, len(inputs.token_slots), wrappers)

    def _plan_prompts(
        self, num_tokens: Ints, lengths: Ints, num_pages: Ints, indices: Tensor
    ) -> dict[int, Any]:
        """Return wrappers with a plan of rows, by window."""
        shape, page_size = self._pages.shape, self._pages.layers[0].shape[2]
        wrappers = next(self._plans)
        for left, wrapper in wrappers.items():
            wrapper.plan(
                _starts(num_tokens),
                _starts(num_pages),
                indices,
                torch.from_numpy((lengths - 1) % page_size + 1).int(),
                shape.heads,
                shape.kv_heads,
                shape.head_dim,
                page_size,
                causal=True,
                sm_scale=self._scale,
                window_left=left,
                q_data_type=self._dtype,
                kv_data_type=self._pages.layers[0].dtype,
            )
        return wrappers


def counted_within(counts: Ints) -> Ints:
    """Return 0, 1, … for each of several counts."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def _starts(counts: Sequence[int] | Ints) -> Tensor:
    """Return where each part begins, and the end, `[parts + 1]` int32 on the host."""
    return torch.from_numpy(np.concatenate(([0], np.cumsum(counts)))).int()
