"""Attention by FlashInfer, with plain torch in its place: what it is asked for is right."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import WorkerArgs
from tests.tiny_models import tiny_gemma2, tiny_llama
from tests.unit.worker_driver import load_on_cpu

from tests.triton_device import DEVICE  # isort: skip
from tests.unit.gpu.graphs import (
    GRAPH_SIZES,
    capture,
    runner_with,
    small_llama,
    small_mistral,
    tokens_of,
)
from worker_proc.engines.factory import make_engine
from worker_proc.gpu import flashinfer as backend
from worker_proc.gpu.engine import TritonEngine
from worker_proc.step.runner import Runner

CPU = torch.device("cpu")


def attend(
    q: Tensor, pool: tuple[Tensor, Tensor], pages: Tensor, length: int, scale: float, left: int
) -> Tensor:
    """Attend the last queries of a row `[tokens, heads, head_dim]` to its pages."""
    keys, values = (part[pages.long()].flatten(0, 1)[:length].transpose(0, 1) for part in pool)
    own = torch.arange(length - len(q), length)[:, None]
    mask = torch.arange(length) <= own
    if left >= 0:
        mask &= torch.arange(length) >= own - left
    query, key, value = (x[None] for x in (q.transpose(0, 1), keys, values))
    attended = F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)
    return attended[0].transpose(0, 1)


class PromptWrapper:
    """What FlashInfer documents of BatchPrefillWithPagedKVCacheWrapper, row by row."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str) -> None:
        assert kv_layout == "NHD"

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int,
        page_size: int, *, causal: bool, sm_scale: float, window_left: int,
        q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        arrays = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert {array.dtype for array in arrays} == {torch.int32} and causal
        self._starts, self._page_starts = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self._indices, self._last = paged_kv_indices, paged_kv_last_page_len.tolist()
        self._page_size, self._scale, self._left = page_size, sm_scale, window_left

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> None:
        for row, last in enumerate(self._last):
            begin, end = self._starts[row : row + 2]
            pages = self._indices[self._page_starts[row] : self._page_starts[row + 1]]
            length = (len(pages) - 1) * self._page_size + last
            out[begin:end] = attend(
                q[begin:end], paged_kv_cache, pages, length, self._scale, self._left
            )


@pytest.fixture
def flashinfer_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: dict[str, dict[str, Any]] = {
        "flashinfer": {},
        "flashinfer.prefill": {"BatchPrefillWithPagedKVCacheWrapper": PromptWrapper},
    }
    for name, attributes in modules.items():
        module = ModuleType(name)
        module.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("flashinfer_in_torch")
@pytest.mark.skipif(DEVICE.type == "cuda", reason="the stand-in asks for values")
@pytest.mark.parametrize("build", [small_llama, small_mistral])
def test_it_gives_the_tokens_of_the_kernel(
    tmp_path: Path, build: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "WORKSPACE_BYTES", 1024)
    directory = build(tmp_path)
    plain = runner_with(directory, None)
    assert isinstance(plain.engine, TritonEngine)
    table = plain.table
    engine = TritonEngine(
        plain.engine.model, table.num_pages, table.page_size, plain.dtype, DEVICE, False,
        GRAPH_SIZES, capture(), flashinfer=True,
    )  # fmt: skip
    engine.capture_graphs(table)
    assert engine.name == "flashinfer"
    tokens = tokens_of(Runner(engine, table, plain.dtype))
    assert tokens == tokens_of(runner_with(directory, None))


@pytest.mark.usefixtures("flashinfer_in_torch")
@pytest.mark.skipif(DEVICE.type == "cuda", reason="builds engines on a CPU")
@pytest.mark.parametrize(
    ("flags", "dtype", "complaint"),
    [
        ({}, torch.float32, "does not work with float32"),
        ({"kv_cache_dtype": "fp8"}, torch.bfloat16, "does not work with kv_cache_dtype fp8"),
        ({"enable_deterministic_inference": True}, torch.bfloat16, "work with enable_determ"),
        ({}, torch.bfloat16, "a head_dim of 24, but with one of"),
    ],
)
def test_unsupported_settings_are_refused_with_the_reason(
    flags: dict[str, Any], dtype: torch.dtype, complaint: str, tmp_path: Path
) -> None:
    model = load_on_cpu(tiny_llama(tmp_path, head_dim=24))
    args = WorkerArgs(attention_backend="flashinfer", **flags)
    with pytest.raises(ConfigError, match=complaint):
        make_engine(args, model, 8, dtype, CPU)


@pytest.mark.usefixtures("flashinfer_in_torch")
def test_a_model_with_soft_caps_is_refused_with_the_reason(tmp_path: Path) -> None:
    model = load_on_cpu(tiny_gemma2(tmp_path, head_dim=64))
    with pytest.raises(ConfigError, match="a model that has attention soft caps"):
        backend.check_flashinfer(model, CPU)


def test_a_missing_package_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    model = load_on_cpu(small_llama(tmp_path))
    with pytest.raises(ConfigError, match=r"pip install 'quadriga\[flashinfer\]'"):
        backend.check_flashinfer(model, CPU)
