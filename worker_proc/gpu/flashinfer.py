"""Attention over pages by FlashInfer, in place of our Triton kernel.

It has not run on a GPU yet.

Rows of one token are computed by its XQA kernel, which takes page tables and lengths as they are on
the device, so that it can be captured. Prompts are computed by its class
`BatchPrefillWithPagedKVCacheWrapper`, whose plan is made on the host. Both read our pages in their
form NHD.

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
from worker_proc.attention.base import Ints
from worker_proc.gpu.kernels.page_tables import gather_page_tables
from worker_proc.gpu.pages import AttentionMetadata, AttentionPlanner, Launch, Pages
from worker_proc.models.base import Model
from worker_proc.models.layers import Attention
from worker_proc.step.inputs import StepInputs
from worker_proc.step.slot_table import SlotTable
from worker_proc.system.transfer import send_all

PAGE_SIZES, MAX_HEAD_DIM = (16, 32, 64, 128), 256  # of XQA
CAPABILITIES = (9, 10, 12)  # major compute capabilities that have XQA
WORKSPACE_BYTES = 128 * 2**20
# A plan is copied from pinned memory, which must not change before: two steps may be outstanding.
NUM_PLANS = 3


def check_flashinfer(model: Model, page_size: int, device: torch.device) -> None:
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
        (page_size not in PAGE_SIZES, f"page_size {page_size}, but with one of {PAGE_SIZES}"),
        (
            shape.head_dim % 16 != 0 or shape.head_dim > MAX_HEAD_DIM,
            f"a head_dim of {shape.head_dim}, but with a multiple of 16 up to {MAX_HEAD_DIM}",
        ),
        (any(one.softcap is not None for one in layers), "a model that has attention soft caps"),
        (any(one.sinks is not None for one in layers), "a model that has attention sinks"),
        (_is_too_old(device), f"the compute capability of {device}, but from 9.0 on"),
    ):
        if is_missing:
            raise ConfigError(
                f"attention_backend flashinfer does not work with {what}: start with"
                " --attention-backend triton"
            )


def _is_too_old(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device)[0] not in CAPABILITIES


def attention_layers(model: Model) -> list[Attention]:
    """Return the attention of every layer."""
    return [module for module in model.modules() if isinstance(module, Attention)]


@dataclass(frozen=True, slots=True)
class XqaLaunch(Launch):
    """Attention of neighbouring rows of one token.

    Attributes:
        workspace: Semaphores, which are zero between two launches, and room for partial results.
        tables: `[rows, pages]` int32.
        lengths: `[rows]` uint32: keys of each row.
        max_keys: Upper bound for one row.
    """

    workspace: Tensor
    tables: Tensor
    lengths: Tensor
    max_keys: int

    def attend(self, q: Tensor, pool: Tensor, out: Tensor, attention: Attention) -> None:
        from flashinfer.decode import xqa_batch_decode_with_kv_cache

        xqa_batch_decode_with_kv_cache(
            q.contiguous(),
            (pool[0], pool[1]),
            self.workspace,
            self.tables,
            self.lengths,
            self.max_keys,
            bmm1_scale=attention.scale,
            window_left=_window_left(attention.window),
            out=out.view(q.shape),
            kv_layout="NHD",
        )


@dataclass(frozen=True, slots=True)
class PromptLaunch(Launch):
    """Attention of prompts; `wrappers` have a plan of the step for each window of the model."""

    wrappers: dict[int, Any]

    def attend(self, q: Tensor, pool: Tensor, out: Tensor, attention: Attention) -> None:
        wrapper = self.wrappers[_window_left(attention.window)]
        wrapper.run(q.contiguous(), (pool[0], pool[1]), out=out.view(q.shape))


def _window_left(window: int | None) -> int:
    """Return how many keys before its own a query sees; -1: all."""
    return -1 if window is None else window - 1


class FlashInferAttention(AttentionPlanner):
    """Launches rows of one token, which come first in a step, apart from prompts."""

    def __init__(self, pages: Pages, model: Model, dtype: torch.dtype) -> None:
        from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

        device = pages.layers[0].device
        layers = attention_layers(model)
        windows = {_window_left(layer.window) for layer in layers}
        self._pages, self._dtype, self._scale = pages, dtype, layers[0].scale
        self._decode_workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._plans = cycle(
            {left: BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD") for left in windows}
            for _ in range(NUM_PLANS)
        )

    def plan_step(self, inputs: StepInputs) -> AttentionMetadata:
        layout, table = inputs.layout, inputs.table
        num_single = int((layout.num_tokens == 1).sum())
        lengths = layout.num_computed + layout.num_tokens
        prompt_pages = -(-lengths[num_single:] // table.page_size)
        page_slots = np.repeat(layout.slots[num_single:], prompt_pages)
        columns = _counted_within(prompt_pages)
        slots, positions, device_slots, device_columns = send_all(
            table.device, inputs.token_slots, inputs.token_positions, page_slots, columns
        )
        launches: list[Launch] = []
        if num_single:
            launches.append(self._decode(table, slots[:num_single], positions[:num_single]))
        if num_single < len(layout.slots):
            indices = table.pages[device_slots, device_columns].int()
            wrappers = self._plan_prompts(
                layout.num_tokens[num_single:], lengths[num_single:], prompt_pages, indices
            )
            launches.append(PromptLaunch(num_single, len(slots), wrappers))
        return AttentionMetadata(table.tokens, table.pages, slots, positions, tuple(launches))

    def plan_decode(
        self, table: SlotTable, slots: Tensor, positions: Tensor, is_long: bool
    ) -> AttentionMetadata:
        launch = self._decode(table, slots, positions)
        return AttentionMetadata(table.tokens, table.pages, slots, positions, (launch,))

    def _decode(self, table: SlotTable, slots: Tensor, positions: Tensor) -> XqaLaunch:
        """Plan rows of one token; one with slot -1 reads a token of the spare page."""
        tables = gather_page_tables(table.pages, slots, positions, table.page_size, table.num_pages)
        lengths = torch.where(slots < 0, 1, positions + 1).int().view(torch.uint32)
        return XqaLaunch(
            0, len(slots), self._decode_workspace, tables, lengths, table.context_length
        )

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


def _counted_within(counts: Ints) -> Ints:
    """Return 0, 1, … for each of several counts."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def _starts(counts: Sequence[int] | Ints) -> Tensor:
    """Return where each part begins, and the end, `[parts + 1]` int32 on the host."""
    return torch.from_numpy(np.concatenate(([0], np.cumsum(counts)))).int()
