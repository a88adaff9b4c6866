"""On a GPU, too, numbers that overflow end their own request and change no other."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quadriga.errors import NonFiniteLogits
from quadriga.wire.packing import pack_ids, unpack_ids
from quadriga.wire.worker import EXTEND, NewSlot, SlotSamplingParams, StepPlan
from tests.tiny_experts import tiny_mixtral
from tests.tiny_models import let_token_overflow, tiny_gemma2, tiny_llama

from tests.triton_device import DEVICE  # isort: skip (before what it has to precede)

from tests.unit.worker_driver import Driver, runner_of
from worker_proc.speculation.ngram import NgramDrafter
from worker_proc.step.runner import Runner

BAD = 67
GOOD = [[3, 4, 5, 6, 7, 8, 9], [20, 21, 22]]
MODELS: dict[str, Any] = {"llama": tiny_llama, "softcap": tiny_gemma2, "experts": tiny_mixtral}


def build(directory: Path, name: str, part: str = "v") -> Runner:
    make = MODELS[name]
    make(directory, num_hidden_layers=1 if name != "softcap" else 2)
    let_token_overflow(directory, BAD, part=part)
    return runner_of(
        directory, device=str(DEVICE), attention_backend="triton", max_total_tokens=128
    )


def answers(runner: Runner) -> list[list[int]]:
    driver = Driver(runner)
    requests = [driver.add(prompt, temperature=i * 0.8) for i, prompt in enumerate(GOOD)]
    driver.generate(requests, 2, chunk=4)
    runner.table.release_all()
    return [request.output for request in requests]


@pytest.mark.parametrize("part", ["v", "k"])
@pytest.mark.parametrize("name", MODELS)
def test_a_request_that_overflows_ends_and_the_others_go_on_unchanged(
    name: str, part: str, tmp_path: Path
) -> None:
    runner = build(tmp_path, name, part)
    alone = answers(runner)
    for page_of_all in runner.engine.kv_parts():
        page_of_all[: runner.table.num_pages].fill_(float("nan"))
    assert answers(runner) == alone, "what was in the pages before contributes"
    driver = Driver(runner)
    good, bad = driver.add(GOOD[0]), driver.add([BAD] * 5)
    driver.step((good, 4))
    result = runner.run(driver.plan([(good, 3), (bad, 5)]))
    assert list(unpack_ids(result.token_ids)) == [alone[0][0], -1]
    assert [(row.row, row.code) for row in result.failed] == [(1, NonFiniteLogits.code)]
    assert [(row.row, row.position) for row in result.nonfinite] == [(1, 0)]
    assert driver.step((good, 1), (bad, 1)) == [alone[0][1], -1]
    runner.table.release_all()
    assert answers(runner) == alone


def test_rules_neither_hide_an_overflow_nor_make_one(tmp_path: Path) -> None:
    runner = build(tmp_path, "llama")
    driver = Driver(runner)
    good, bad = driver.add(GOOD[0]), driver.add([BAD] * 5)
    for request in (good, bad):
        rules = SlotSamplingParams(len(request.prompt), allowed_ids=pack_ids([7]))
        driver.set_rules(request, rules)
    result = runner.run(driver.plan([(good, 7), (bad, 5)]))
    assert list(unpack_ids(result.token_ids)) == [7, -1]
    assert [(row.row, row.code) for row in result.failed] == [(1, NonFiniteLogits.code)]


def test_a_wrong_draft_that_overflows_changes_nothing(tmp_path: Path) -> None:
    runner = build(tmp_path, "llama")
    new = [
        NewSlot(slot, pack_ids(prompt), 0, pack_ids(range(4 * slot, 4 * slot + 4)), 0.0, -1, 1.0, 0)
        for slot, prompt in enumerate([*GOOD, [3, BAD]])
    ]
    counts = pack_ids([7, 3, 2])
    plan = StepPlan(0, EXTEND, pack_ids([0, 1, 2]), counts, new, b"")
    plain = runner.run(plan)
    runner.table.release_all()
    runner.drafter = drafter = NgramDrafter(runner.table)
    drafter._draft_slot = lambda slot, most: [BAD, BAD]  # type: ignore[method-assign]
    drafting = StepPlan(0, EXTEND, plan.slots, counts, new, b"", num_guesses=pack_ids([2, 2, 2]))
    result = runner.run(drafting)
    assert result.token_ids == plain.token_ids
    assert result.failed == plain.failed and len(result.failed) == 1
    assert result.nonfinite == plain.nonfinite
    assert sorted((row.row, row.token_ids) for row in result.guessed) == [
        (n, b"") for n in range(3)
    ]


def test_the_page_of_a_middle_chunk_is_reported(tmp_path: Path) -> None:
    runner = build(tmp_path, "llama")
    driver = Driver(runner)
    request = driver.add([1, 2, 3, 4, 5, BAD, 7, 8, 9])
    assert runner.run(driver.plan([(request, 4)])).nonfinite == []
    (row,) = runner.run(driver.plan([(request, 3)])).nonfinite
    assert row.position in (4, 5)
    assert torch.equal(runner.table.nonfinite_from.cpu() < 9, runner.table.nonfinite_from.cpu() < 6)
