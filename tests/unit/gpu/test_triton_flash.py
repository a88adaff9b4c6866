"""Attention by FlashAttention-3, with plain torch in its place: what it is asked for is right."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quadriga.config.worker_args import WorkerArgs
from quadriga.errors import ConfigError
from tests.tiny_models import tiny_gemma2
from tests.unit.worker_driver import load_on_cpu

from tests.unit.gpu.test_triton_graphs import (  # isort: skip
    capture,
    runner_with,
    small_llama,
    small_mistral,
    tokens_of,
)
from worker_proc.engine_factory import make_engine
from worker_proc.gpu import flash
from worker_proc.gpu.engine import TritonEngine


def attend_in_torch(
    out: Tensor, q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, _: None,
    most_queries: int, most_keys: int, *, scale: float, window_size: tuple[int, int],
    enable_gqa: bool, seqused_k: Tensor, block_table: Tensor,
) -> None:  # fmt: skip
    """What torch documents of varlen_attn_out with pages, row by row."""
    assert window_size[1] == 0 and enable_gqa
    assert {starts.dtype, seqused_k.dtype, block_table.dtype} == {torch.int32}
    for row, length in enumerate(seqused_k.tolist()):
        begin, end = starts[row : row + 2].tolist()
        assert end - begin <= most_queries and length <= most_keys
        there = keys[block_table[row]].flatten(0, 1)[:length]
        values_there = values[block_table[row]].flatten(0, 1)[:length]
        queries = torch.arange(end - begin, device=q.device) + length - (end - begin)
        mask = torch.arange(length, device=q.device) <= queries[:, None]
        if window_size[0] >= 0:
            mask &= torch.arange(length, device=q.device) >= queries[:, None] - window_size[0]
        by_head = [x.transpose(0, 1)[None] for x in (q[begin:end], there, values_there)]
        attended = F.scaled_dot_product_attention(*by_head, mask, scale=scale, enable_gqa=True)  # type: ignore[misc,call-arg,arg-type]
        out[begin:end] = attended[0].transpose(0, 1)


@pytest.fixture
def flash_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "varlen_attn_out", attend_in_torch)


@pytest.mark.usefixtures("flash_in_torch")
@pytest.mark.parametrize("with_graphs", [False, True])
@pytest.mark.parametrize("build", [small_llama, small_mistral])
def test_it_gives_the_tokens_of_the_kernel(
    tmp_path: Path, with_graphs: bool, build: Callable[[Path], Path]
) -> None:
    directory = build(tmp_path)
    capturing = capture() if with_graphs else None
    runner = runner_with(directory, capturing, flash=True)
    assert runner.engine.name == "flash"
    assert tokens_of(runner) == tokens_of(runner_with(directory, None))


@pytest.mark.parametrize(
    ("flags", "dtype", "complaint"),
    [
        ({}, torch.float32, "flash does not work with float32"),
        ({"kv_cache_dtype": "fp8"}, torch.bfloat16, "flash does not work with kv_cache_dtype fp8"),
        ({}, torch.bfloat16, "needs FlashAttention-3 beside torch"),
    ],
)
def test_unsupported_settings_are_refused_with_the_reason(
    flags: dict[str, Any], dtype: torch.dtype, complaint: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    engine = runner_with(small_llama(tmp_path), None).engine
    assert isinstance(engine, TritonEngine)
    args = WorkerArgs(attention_backend="flash", **flags)
    with pytest.raises(ConfigError, match=complaint):
        make_engine(args, engine.model, 8, dtype, torch.device("cpu"))


def test_a_model_with_soft_caps_is_refused_with_the_reason(tmp_path: Path) -> None:
    model = load_on_cpu(tiny_gemma2(tmp_path))
    with pytest.raises(ConfigError, match="flash does not work with a model that has an attention"):
        flash.check_attention(model)
