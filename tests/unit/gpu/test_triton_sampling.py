"""The sampling kernels against the sampler of plain torch, and one row against many."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.triton_device import DEVICE  # isort: skip (before what it has to precede)

from quadriga.wire.packing import pack_ids
from quadriga.wire.worker import NewSlot, SlotSamplingParams
from tests import EVERYTHING
from worker_proc.gpu.kernels import sampling
from worker_proc.gpu.kernels.sampling import sample_tokens
from worker_proc.sampling.sampler import SamplingState, sample

NUM_SLOTS = 40
PARAMS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.8},
    {"temperature": 2.0, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 30, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 0.9, "top_p": 0.01},
    {"temperature": 0.9, "top_k": 1},
    {"temperature": 5.0, "top_k": 100_000, "top_p": 0.999},
]


def request(slot: int, seed: int, temperature: float = 0.0, top_k: int = -1, top_p: float = 1.0,
            min_p: float = 0.0) -> NewSlot:  # fmt: skip
    rules = SlotSamplingParams(num_prompt=1, min_p=min_p) if min_p else None
    return NewSlot(slot, pack_ids([1]), 0, pack_ids([0]), temperature, top_k, top_p, seed, rules)


def sampling_of(params: list[dict[str, float]]) -> SamplingState:
    state = SamplingState(NUM_SLOTS, DEVICE)
    state.admit([request(slot, 100 + slot, **one) for slot, one in enumerate(params)])  # type: ignore[arg-type]
    return state


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def known_tokens() -> Tensor:
    return torch.zeros(NUM_SLOTS, 64, dtype=torch.int32, device=DEVICE)


def draw(rows: int, vocab_size: int, spread: float, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(rows + vocab_size)
    return (spread * torch.randn(rows, vocab_size, generator=generator)).to(DEVICE, dtype)


@pytest.mark.parametrize(
    ("vocab_size", "spread", "dtype"),
    [(7, 1.0, torch.bfloat16), (20_000, 2.5, torch.bfloat16), (9001, 0.3, torch.float32)],
)
def test_tokens_are_those_of_plain_torch(
    vocab_size: int, spread: float, dtype: torch.dtype
) -> None:
    """bfloat16 has many equal logits, some of them at the thresholds."""
    state, rows = sampling_of(PARAMS), len(PARAMS)
    logits, known = draw(rows, vocab_size, spread, dtype), known_tokens()
    slots = np.arange(rows)
    for position in (3, 17) if EVERYTHING else (17,):
        expected = sample(logits, state.sampling_rows(slots, np.full(rows, position)))
        places = ints([position - 1] * rows)
        token_ids = sample_tokens(logits, ints(slots.tolist()), places, state, known)
        assert token_ids.tolist() == expected.tolist()
        assert known[:rows, position].tolist() == expected.tolist()


def test_a_token_does_not_depend_on_how_many_likely_ones_are_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With few in the list of a span the nearest are listed; with one the whole row is searched."""
    state, logits = sampling_of(PARAMS), draw(len(PARAMS), 5000, 2.5, torch.bfloat16)
    slots, positions = ints(list(range(len(PARAMS)))), ints([9] * len(PARAMS))
    tokens = []
    for listed in (4 * 4096, 4 * 1024, 4 * 256, 4):
        monkeypatch.setattr(sampling, "MAX_LIKELY", listed)
        tokens.append(sample_tokens(logits, slots, positions, state, known_tokens()).tolist())
    assert all(other == tokens[0] for other in tokens[1:])


def test_a_row_has_the_token_that_it_has_alone() -> None:
    params = PARAMS[1:7:2]
    state, logits = sampling_of(params), draw(len(params), 6000, 1.5)
    slots, positions = ints(list(range(len(params)))), ints([5] * len(params))
    together = sample_tokens(logits, slots, positions, state, known_tokens())
    for row in range(len(params)):
        part = slice(row, row + 1)
        alone = sample_tokens(logits[part], slots[part], positions[part], state, known_tokens())
        assert alone.tolist() == together[part].tolist()


def test_drawn_tokens_have_the_shares_of_their_weights() -> None:
    state = sampling_of([{"temperature": 1.0}])
    weights = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05], device=DEVICE)
    count = 1000 if EVERYTHING else 100
    logits, slots = weights.log().repeat(count, 1), ints([0] * count)
    known = torch.zeros(1, count + 1, dtype=torch.int32, device=DEVICE)
    token_ids = sample_tokens(logits, slots, ints(list(range(count))), state, known)
    shares = torch.bincount(token_ids, minlength=5) / count
    assert shares[1] == 0 and (shares - weights).abs().max() < 0.15


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite_have_no_token_and_change_no_other(value: float) -> None:
    state, logits = sampling_of(PARAMS), draw(len(PARAMS), 5000, 3.0)
    slots, positions = ints(list(range(len(PARAMS)))), ints([5] * len(PARAMS))
    good = sample_tokens(logits, slots, positions, state, known_tokens())
    broken, known = logits.clone(), known_tokens()
    broken[::2, 4999] = value
    if value == float("-inf"):
        broken[::2] = value
    token_ids = sample_tokens(broken, slots, positions, state, known)
    assert token_ids[1::2].equal(good[1::2])
    assert (token_ids[::2] == -1).all()
    assert (known[: len(PARAMS) : 2, 6] == 0).all()


def test_masked_logits_are_never_drawn() -> None:
    state, logits = sampling_of(PARAMS), torch.full((len(PARAMS), 5000), float("-inf"))
    logits[:, 4321], logits[:, 17] = -3.0, -3.5
    slots, positions = ints(list(range(len(PARAMS)))), ints([5] * len(PARAMS))
    token_ids = sample_tokens(logits.to(DEVICE), slots, positions, state, known_tokens())
    assert set(token_ids.tolist()) <= {17, 4321}


def test_padding_rows_write_nothing_and_strided_logits_are_read_by_row() -> None:
    state, known = sampling_of([{}]), known_tokens()
    wide = draw(2, 96, 1.0)
    logits = wide[:, :90]
    token_ids = sample_tokens(logits, ints([-1, 0]), ints([0, 2]), state, known)
    assert int(token_ids[1]) == int(logits[1].argmax())
    assert known.nonzero().tolist() == [[0, 3]]
