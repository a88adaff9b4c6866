"""A sampled token is a function of seed, position and logits, and follows their distribution."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.tiny_models import tiny_gpt2
from tests.unit.worker_driver import Driver, Request, prompts_of, runner_of
from worker_proc.sampling import sampler
from worker_proc.sampling.sampler import NO_SAMPLE, SamplingRows, argmax, sample, uniform


def rows_of(
    count: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 7,
    first_position: int = 0,
) -> SamplingRows:
    return SamplingRows(
        greedy=torch.full((count,), temperature == 0 or top_k == 1),
        temperature=torch.full((count,), temperature),
        top_k=torch.full((count,), top_k),
        top_p=torch.full((count,), top_p),
        min_p=torch.full((count,), min_p),
        seed=torch.full((count,), seed),
        position=torch.arange(first_position, first_position + count),
    )


def one_of(rows: SamplingRows, index: int) -> SamplingRows:
    return joined([rows], slice(index, index + 1))


def joined(parts: list[SamplingRows], which: slice = slice(None)) -> SamplingRows:
    names = SamplingRows.__slots__
    return SamplingRows(
        **{name: torch.cat([getattr(part, name) for part in parts])[which] for name in names}
    )


def frequencies(logits: Tensor, count: int = 40_000, **parameters: float) -> Tensor:
    rows = rows_of(count, **parameters)  # type: ignore[arg-type]
    tokens = sample(logits.expand(count, -1), rows)
    return torch.bincount(tokens, minlength=len(logits)).double() / count


def assert_close_to(expected: Tensor, observed: Tensor, count: int = 40_000) -> None:
    """Check Pearson's chi-square against a bound far beyond the 99.9 % quantile."""
    possible = expected > 0
    assert observed[~possible].sum() == 0
    statistic = (count * (observed - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = int(possible.sum()) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5 + 8


LOGITS = torch.tensor([2.0, -1.0, 0.5, 1.5, -3.0, 0.0, 1.0, -0.5])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax_at_the_temperature(temperature: float) -> None:
    expected = torch.softmax(LOGITS.double() / temperature, -1)
    assert_close_to(expected, frequencies(LOGITS, temperature=temperature))


def test_top_k_samples_from_the_k_likeliest_only() -> None:
    dropped = LOGITS.argsort()[:-3]
    kept = LOGITS.double().index_fill(0, dropped, -torch.inf)
    assert_close_to(torch.softmax(kept, -1), frequencies(LOGITS, top_k=3))


def test_top_p_samples_from_the_smallest_set_that_reaches_the_mass() -> None:
    probabilities = torch.softmax(LOGITS.double(), -1)
    order = probabilities.argsort(descending=True)
    size = int((probabilities[order].cumsum(0) < 0.8).sum()) + 1
    expected = torch.zeros_like(probabilities)
    expected[order[:size]] = probabilities[order[:size]] / probabilities[order[:size]].sum()
    assert_close_to(expected, frequencies(LOGITS, top_p=0.8))


def test_top_p_counts_mass_within_what_top_k_left() -> None:
    top = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    observed = frequencies(top, top_k=2, top_p=0.5)
    assert observed.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_min_p_drops_what_is_that_much_less_likely_than_the_likeliest() -> None:
    probabilities = torch.softmax(LOGITS.double() / 2, -1)
    expected = probabilities * (probabilities >= 0.3 * probabilities.max())
    observed = frequencies(LOGITS, min_p=0.3, temperature=2.0)
    assert_close_to(expected / expected.sum(), observed)


def test_a_tiny_top_p_leaves_the_likeliest_token() -> None:
    assert frequencies(LOGITS, count=100, top_p=1e-6)[0] == 1.0


def test_top_p_over_a_flat_distribution_sorts_the_whole_row() -> None:
    logits = torch.linspace(0.1, 0.0, 2000).repeat(500, 1)
    probabilities = torch.softmax(logits[0].double(), -1)
    size = int((probabilities.cumsum(0) < 0.9).sum()) + 1
    tokens = sample(logits, rows_of(500, top_p=0.9))
    assert sampler.LIKELY_TOKENS < tokens.max() < size


def test_equal_logits_are_kept_or_dropped_together() -> None:
    observed = frequencies(torch.tensor([1.0, 0.0, 1.0, 1.0]), top_k=2)
    assert (observed > 0).tolist() == [True, False, True, True]


def test_temperature_zero_and_top_k_one_take_the_first_likeliest_token() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 3.0, 5.0]])
    assert sample(logits, None).tolist() == [1, 0]
    assert sample(logits, rows_of(2, temperature=0.0)).tolist() == [1, 0]
    assert sample(logits, rows_of(2, top_k=1)).tolist() == [1, 0]


@pytest.mark.parametrize("vocab_size", [1, 5, 511, 512, 513, 1024, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_search_in_blocks_finds_what_argmax_finds(vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    spread = torch.randn(64, vocab_size, generator=generator).to(dtype)
    with_equals = torch.randint(-3, 3, (64, vocab_size), generator=generator).to(dtype)
    broken = spread.clone()
    broken[::2, vocab_size // 2 :] = float("nan")
    for logits in (spread, with_equals):
        assert argmax(logits).equal(logits.argmax(-1))
    assert argmax(broken)[1::2].equal(spread[1::2].argmax(-1))
    assert argmax(broken)[::2].eq(NO_SAMPLE).all()
    assert argmax(torch.full_like(spread, float("-inf"))).eq(NO_SAMPLE).all()


def test_a_row_samples_alone_what_it_samples_among_rows_of_any_other_kind() -> None:
    parts = [
        rows_of(8),
        rows_of(8, temperature=0.0, first_position=8),
        rows_of(8, top_k=40, seed=1, first_position=16),
        rows_of(8, top_p=0.5, seed=2, first_position=24),
        rows_of(8, top_k=300, top_p=0.99, seed=3, first_position=32),
        rows_of(8, top_p=0.999, temperature=3.0, seed=4, first_position=40),
        rows_of(8, min_p=0.2, temperature=2.0, seed=5, first_position=48),
    ]
    rows = joined(parts)
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(56, 1000, generator=generator) * 3).bfloat16()
    together = sample(logits, rows)
    alone = [int(sample(logits[i : i + 1], one_of(rows, i))) for i in range(56)]
    assert together.tolist() == alone


def test_the_random_number_depends_on_seed_and_position_alone() -> None:
    seeds, positions = torch.tensor([5, 5, 6, 2**63 - 1]), torch.tensor([0, 1, 0, 9])
    draws = uniform(seeds, positions)
    assert len(set(draws.tolist())) == 4
    swapped = uniform(seeds.flip(0), positions.flip(0))
    assert swapped.flip(0).tolist() == draws.tolist()


def test_the_random_numbers_match_splitmix64_in_plain_integers() -> None:
    mask = 2**64 - 1

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    gamma = 0x9E3779B97F4A7C15
    for seed, position in [(0, 0), (1, 2), (2**63 - 1, 4095), (12345678901234567, 77)]:
        start = mix((seed + gamma) & mask)
        bits = mix((start + (position + 1) * gamma) & mask)
        drawn = uniform(torch.tensor([seed]), torch.tensor([position]))
        assert drawn.item() == (bits >> 40) / 2**24


def test_the_random_numbers_are_spread_evenly_over_seeds_and_positions() -> None:
    seeds = torch.arange(200).repeat_interleave(200)
    draws = uniform(seeds, torch.arange(200).repeat(200)).numpy()
    assert draws.min() >= 0
    assert draws.max() < 1
    observed = np.histogram(draws, bins=50, range=(0, 1))[0]
    assert ((observed - 800) ** 2 / 800).sum() < 100


@pytest.mark.parametrize("draw", [0.0, 1 - 2.0**-24])
def test_no_draw_selects_a_token_of_probability_zero(draw: float) -> None:
    scores = torch.full((1, 10 * sampler.BLOCK), float("-inf"))
    scores[0, 1000:4000] = torch.linspace(-20, 0.3, 3000)
    token = sampler._invert(scores, torch.tensor([draw]))
    assert 1000 <= int(token) < 4000


def generated(directory: Path, together: bool) -> list[list[int]]:
    driver = Driver(runner_of(directory), seed=int(together))
    requests: list[Request] = []
    kinds = [(0.0, -1, 1.0), (0.8, -1, 1.0), (1.0, 20, 1.0), (1.2, -1, 0.9), (0.7, 50, 0.95)]
    for index, (prompt, kind) in enumerate(zip(prompts_of([3, 9, 1, 20, 14]), kinds, strict=True)):
        temperature, top_k, top_p = kind
        requests.append(driver.add(prompt, temperature, top_k, top_p, seed=index))
        if not together:
            driver.generate(requests[-1:], 20)
    driver.generate(requests, 20, chunk=6)
    return [request.output for request in requests]


def test_seeded_requests_give_the_same_tokens_alone_and_in_a_batch(tmp_path: Path) -> None:
    directory = tiny_gpt2(tmp_path)
    assert generated(directory, together=True) == generated(directory, together=False)


def test_a_request_continued_in_a_new_slot_samples_what_it_would_have(tmp_path: Path) -> None:
    runner = runner_of(tiny_gpt2(tmp_path))
    driver = Driver(runner)
    whole = driver.add([4, 5, 6], temperature=0.9, seed=3)
    driver.generate([whole], 20)
    continued = driver.add([4, 5, 6, *whole.output[:8]], temperature=0.9, seed=3)
    driver.generate([continued], 12)
    assert continued.output == whole.output[8:20]


@pytest.mark.parametrize("draw", [0.0, 0.5, 1.0])
def test_no_draw_gives_a_token_outside_the_vocabulary(
    monkeypatch: pytest.MonkeyPatch, draw: float
) -> None:
    monkeypatch.setattr(sampler, "uniform", lambda seed, position: torch.full(seed.shape, draw))
    for rows in (rows_of(3), rows_of(3, top_k=5), rows_of(3, top_p=1e-30), rows_of(3, 1e30)):
        tokens = sample(torch.zeros(3, 100), rows)
        assert tokens.min() >= 0
        assert tokens.max() < 100


@pytest.mark.parametrize(
    "row",
    [
        [float("nan")] * 4,
        [1.0, float("nan"), 2.0, 3.0],
        [1.0, 2.0, float("inf"), 3.0],
        [float("-inf")] * 4,
    ],
)
def test_a_row_that_is_not_finite_has_no_token_and_others_have_theirs(row: list[float]) -> None:
    logits = torch.tensor([row, [float("-inf"), 5.0, float("-inf"), 5.0]])
    for rows in (None, rows_of(2), rows_of(2, top_k=2), rows_of(2, top_p=0.9), rows_of(2, 0.0)):
        broken, good = sample(logits, rows).tolist()
        assert broken == NO_SAMPLE
        assert good in (1, 3)


def test_large_finite_logits_are_drawn_from_at_a_low_temperature() -> None:
    logits = torch.tensor([[2e38, 3e38, -3e38], [1.0, 2.0, 3.0]])
    assert sample(logits, rows_of(2, temperature=0.02)).tolist() == [1, 2]
