"""The cost model: features of plans, fitting, calibration, and errors of files."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bench.simulate.fit_cost_model import (
    calibrate,
    design,
    features_of_case,
    fit,
    main,
    measure,
    non_negative_least_squares,
)
from bench.worker_steps import Row, WorkerBench
from quadriga.errors import ConfigError
from quadriga.wire.packing import unpack_ids
from quadriga.wire.worker import StepPlan, StepResult
from simulator import cost_model
from simulator.cost_model import CostModel, Delays, Features, MeasuredOn, features_of

MEASURED_ON = MeasuredOn(
    model="tiny",
    dtype="float32",
    device="cpu",
    threads=1,
    date="2026-01-01",
    vocab_size=100,
    context_length=64,
    max_total_tokens=256,
)
MS = {"steps": 20.0, "tokens": 0.5, "decode_keys": 0.01, "extend_pairs": 0.001}


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_a_row_of_one_token_sees_its_context_and_itself() -> None:
    assert features_of(ints(1, 1), ints(9, 4), samples=2) == Features(
        steps=1,
        extends=0,
        rows=2,
        tokens=2,
        tokens_beyond=0,
        samples=2,
        decode_keys=15,
        extend_pairs=0,
    )


def test_each_token_of_a_prompt_sees_those_before_it() -> None:
    found = features_of(ints(3), ints(10), samples=0)
    assert found == Features(1, 1, 1, 3, 0, 0, decode_keys=0, extend_pairs=11 + 12 + 13)


@pytest.mark.parametrize("window", [1, 5, 12, 100])
def test_with_a_window_a_token_sees_no_more_keys_than_that(window: int) -> None:
    num_tokens, computed = [1, 7, 1, 20], [3, 8, 40, 0]
    keys = [
        sum(min(before + i + 1, window) for i in range(count))
        for count, before in zip(num_tokens, computed, strict=True)
    ]
    found = features_of(ints(*num_tokens), ints(*computed), 2, window)
    assert (found.decode_keys, found.extend_pairs) == (keys[0] + keys[2], keys[1] + keys[3])
    if window == 100:
        assert found == features_of(ints(*num_tokens), ints(*computed), 2)


def test_a_mixed_step_counts_both_kinds_of_rows_apart() -> None:
    assert features_of(ints(20), ints(0), samples=1).tokens_beyond == 8
    found = features_of(ints(1, 2, 1), ints(5, 0, 7), samples=3)
    assert (found.decode_keys, found.extend_pairs) == (6 + 8, 1 + 2)


def test_a_step_costs_the_sum_of_its_work() -> None:
    model = CostModel(ms=MS, measured_on=MEASURED_ON)
    assert model.prices[0] == pytest.approx(0.020)
    assert model.step_ms(features_of(ints(1), ints(99), 1)) == pytest.approx(20 + 0.5 + 1.0)


def test_a_saved_cost_model_is_loaded_unchanged(tmp_path: Path) -> None:
    model = CostModel(ms=MS, measured_on=MEASURED_ON, delays_ms=Delays(gap=0.5))
    cost_model.save(tmp_path / "model.json", model)
    assert cost_model.load(tmp_path / "model.json") == model


@pytest.mark.parametrize("text", ["{", "{}", '{"ms": {"heads": 1.0}}'])
def test_a_file_that_is_no_cost_model_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"model\.json"):
        cost_model.load(path)


def test_an_unknown_feature_is_named() -> None:
    with pytest.raises(ValueError, match="heads"):
        CostModel(ms={"heads": 1.0}, measured_on=MEASURED_ON)


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fit_cost_model"):
        cost_model.load(tmp_path / "none.json")


def test_the_model_that_is_shipped_can_be_loaded() -> None:
    model = cost_model.load(cost_model.DEFAULT)
    assert model.measured_on.device == "cpu"
    assert model.step_ms(features_of(ints(1), ints(10), 1)) > 1


def test_least_squares_finds_what_made_the_numbers() -> None:
    source = np.random.default_rng(0)
    a, x = source.random((30, 5)), np.array([3.0, 0.0, 1.0, 0.0, 0.2])
    assert non_negative_least_squares(a, a @ x) == pytest.approx(x, abs=1e-9)


def test_least_squares_gives_nothing_below_zero() -> None:
    source = np.random.default_rng(1)
    for _ in range(20):
        a, b = source.normal(size=(12, 6)), source.normal(size=12)
        x = non_negative_least_squares(a, b)
        gain = a.T @ (b - a @ x)
        assert (x >= 0).all()
        assert (gain[x == 0] < 1e-8).all(), "a larger x would fit better"
        assert np.abs(gain[x > 0]).max(initial=0) < 1e-8


class FakeRunner:
    """A runner whose steps take a cost model's time; it checks every plan as the worker does."""

    def __init__(self, model: CostModel, num_pages: int = 4096, page_size: int = 16) -> None:
        self.table = self
        self.num_pages, self.page_size = num_pages, page_size
        self._model = model
        self._slots: dict[int, list[int]] = {}

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        result = self._result(plan)
        return lambda: result

    def _result(self, plan: StepPlan) -> StepResult:
        for slot in unpack_ids(plan.released):
            del self._slots[slot]
        used: set[int] = set()
        for new in plan.new:
            known, pages = len(new.token_ids) // 4, unpack_ids(new.pages)
            assert new.slot not in self._slots
            assert len(pages) * self.page_size >= known
            assert max(pages) < self.num_pages
            assert not used & set(pages)
            used |= set(pages)
            self._slots[new.slot] = [new.computed, known]
        counts = ints(*unpack_ids(plan.num_tokens))
        states = [self._slots[slot] for slot in unpack_ids(plan.slots)]
        samples = sum(state[0] + n == state[1] for state, n in zip(states, counts, strict=True))
        seconds = 0.0
        if states:
            before = ints(*(state[0] for state in states))
            seconds = self._model.step_ms(features_of(counts, before, samples)) / 1000
        return StepResult(plan.step, b"", 0.0, seconds)


def test_measuring_and_fitting_find_the_model_again() -> None:
    truth = CostModel(ms=MS, measured_on=MEASURED_ON)
    cases = design()
    measured = measure(WorkerBench(FakeRunner(truth)), cases, repeats=1)  # type: ignore[arg-type]
    found, quality = fit([features_of_case(case) for case in cases], measured)
    assert {name: price for name, price in found.items() if price > 1e-6} == pytest.approx(MS)
    assert quality.p90_error < 1e-6


def test_a_chunk_that_does_not_end_its_prompt_samples_nothing() -> None:
    assert features_of_case((Row(0, 64, ends=False), Row(5, 1))).samples == 1


def test_the_delays_come_from_the_medians_of_a_measured_run() -> None:
    def run(ms: float) -> dict[str, object]:
        spread = {"p50": ms}
        summary = {"to_server": spread, "tokenize": {"p50": 0.5}, "delivery": {"p50": 2 * ms}}
        return {"summary": summary, "server_info": {"step_gap_ms_p50": ms / 10}}

    model = CostModel(ms=MS, measured_on=MEASURED_ON, delays_ms=Delays(plan=0.3))
    calibrated = calibrate(model, [run(1.0), run(3.0), run(2.0)], 1.2)
    assert calibrated.delays_ms == Delays(message_in=2.5, plan=0.3, gap=0.2, delivery=4.0)
    assert (calibrated.ms, calibrated.slowdown) == (MS, 1.2)


def test_calibrating_without_a_model_says_so_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--calibrate", "run.json", "--out", str(tmp_path / "none.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
