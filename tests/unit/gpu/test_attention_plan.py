"""How the attention of a step is cut into programs, so that none walks alone through long rows."""

import numpy as np
import pytest
import torch

from tests.triton_device import DEVICE  # isort: skip (before what it has to precede)

from worker_proc.gpu import pages
from worker_proc.gpu.kernels.attention import MAX_SPLITS
from worker_proc.gpu.pages import LONG_SPLITS, Pages, TritonAttention, query_blocks
from worker_proc.models.attention import AttentionShape, BatchLayout


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pages:
    """Return pages of 8 key heads on a GPU with 132 multiprocessors, such as an H100."""
    monkeypatch.setattr(pages, "num_multiprocessors", lambda device: 132)
    shape = AttentionShape(layers=1, heads=8, kv_heads=8, head_dim=16)
    return Pages(shape, 4, 4, torch.float32, DEVICE)


def layout(computed: int, count: int) -> BatchLayout:
    table = torch.zeros(1, 1, dtype=torch.int64)
    return BatchLayout(table, np.array([0]), np.array([computed]), np.array([count]))


def test_keys_are_split_where_rows_are_few_or_one_is_long(pool: Pages) -> None:
    assert pool.num_splits(1, False) == MAX_SPLITS
    assert pool.num_splits(64, False) == 1
    assert pool.num_splits(64, True) == LONG_SPLITS


@pytest.mark.parametrize(
    ("computed", "deterministic", "is_split"),
    [(9000, False, True), (0, False, False), (9000, True, False)],
)
def test_the_keys_of_a_few_tokens_behind_a_long_prefix_are_split(
    pool: Pages, computed: int, deterministic: bool, is_split: bool
) -> None:
    attention = TritonAttention(pool, torch.float32, deterministic)
    blocks = query_blocks(layout(computed, 20), 0, attention.max_queries)
    assert (attention._splits_of_prompts(blocks) > 1) == is_split


def test_blocks_of_a_prompt_with_the_most_keys_come_first() -> None:
    blocks = query_blocks(layout(100, 10), 0, 4)
    assert blocks.tolist() == [[0, 0, 0], [108, 104, 100], [8, 4, 0], [2, 4, 4]]
