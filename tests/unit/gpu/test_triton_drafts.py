"""Drafted tokens on the engine for a GPU: the tokens of steps without drafts, in fewer steps."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch

from quadriga.errors import ConfigError
from quadriga.server.config.server_config import ServerConfig
from quadriga.wire.packing import pack_ids, unpack_ids
from quadriga.wire.worker import (
    DECODE,
    EXTEND,
    MIXED,
    NewSlot,
    SlotSamplingParams,
    StepPlan,
)
from tests import EVERYTHING

from tests.triton_device import DEVICE  # isort: skip (before what it has to precede)

from tests.unit.drafting import (
    Answer,
    FixedDrafter,
    generate,
    no_rules,
    penalties,
    rows_of,
    with_logprobs,
)
from tests.unit.gpu.graphs import capture, runner_with, small_llama
from tests.unit.worker_driver import prompts_of, runner_of
from worker_proc.gpu.engine import TritonEngine
from worker_proc.speculation.ngram import NgramDrafter, SlotText
from worker_proc.speculation.self_draft import wants_draft
from worker_proc.startup import drafts
from worker_proc.step.engine import Engine
from worker_proc.step.runner import Runner
from worker_proc.step.slot_table import SlotTable

NUM_TOKENS = 5
FLOAT32: dict[str, object] = {}
DETERMINISTIC: dict[str, object] = {"dtype": "bfloat16", "enable_deterministic_inference": True}
NGRAM = {"speculative_method": "ngram"}
Rules = Callable[[int], SlotSamplingParams | None]


def drafting_runner(directory: Path, with_graphs: bool, **flags: object) -> Runner:
    """Build a runner whose slots are read and written as they are on a GPU."""
    captured = capture() if with_graphs else None
    runner = runner_with(small_llama(directory), captured, drafts=True, **flags)
    runner.table._host_tokens = None
    return runner


def requests_of(rules: list[Rules]) -> list[NewSlot]:
    """Return a greedy request and drawn ones, with these rules."""
    prompts = prompts_of([3, 2, 1][: len(rules)])
    new = [rows_of(prompts, one, 1.0)[slot] for slot, one in enumerate(rules)]
    return [msgspec.structs.replace(new[0], temperature=0.0), *new[1:]]


def answers_of(new: list[NewSlot], answers: list[Answer]) -> dict[int, list[int]]:
    """Return prompt and answer of each slot, as FixedDrafter takes them."""
    return {
        one.slot: [*unpack_ids(one.token_ids), *tokens]
        for one, (tokens, _) in zip(new, answers, strict=True)
    }


def count_replays(runner: Runner) -> list[int]:
    """Return a list that gets the number of tokens of each step with drafts that is a graph."""
    engine, replays = cast(TritonEngine, runner.engine), []
    graphs = engine._prompt_graphs
    assert graphs is not None
    run = graphs.run

    def counting(step: Any, clock: Any) -> Any:
        output = run(step, clock)
        if output is not None and runner.table.has_drafts:
            replays.append(len(step.slots))
        return output

    graphs.run = counting  # type: ignore[method-assign]
    return replays


def alternating(num_prompt: int) -> SlotSamplingParams:
    """Token 7 unless it was the last one, and 8 then: each follows from the token before it."""
    bias = np.array([50.0, 40.0], dtype="<f4").tobytes()
    return SlotSamplingParams(
        num_prompt, bias_ids=pack_ids([7, 8]), bias=bias, bad_words=[pack_ids([7, 7])]
    )


PLAIN: list[Rules] = [no_rules] * 3
PROCESSED: list[Rules] = [penalties, alternating, with_logprobs]
CASES = [
    pytest.param(flags, with_graphs, rules, id=f"{number}-{name}-{kind}")
    for number, flags in (("float32", FLOAT32), ("deterministic", DETERMINISTIC))
    for name, with_graphs in (("graphs", True), ("kernels", False))
    for kind, rules in (("plain", PLAIN), ("processed", PROCESSED))
    # Half of the cases have every pair of these.
    if EVERYTHING or (number == "float32") ^ with_graphs ^ (kind == "plain")
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("flags", "with_graphs", "rules"), CASES)
def test_answers_are_the_same_with_right_and_wrong_drafts(
    tmp_path: Path, flags: dict[str, object], with_graphs: bool, rules: list[Rules]
) -> None:
    runner = drafting_runner(tmp_path, with_graphs, **flags)
    replays = count_replays(runner) if with_graphs else [1]
    new = requests_of(rules)
    expected, num_steps = generate(runner, new, 0, NUM_TOKENS)
    answers = answers_of(new, expected)
    for rows, num_drafts, wrong_every in ((new, 1, 4), (new[1:2], 5, 6)):
        runner.drafter = FixedDrafter(runner, answers, wrong_every)
        got, num_drafted_steps = generate(runner, rows, num_drafts, NUM_TOKENS)
        for one, (tokens, logprobs) in zip(rows, got, strict=True):
            expected_tokens, expected_logprobs = expected[one.slot]
            assert tokens == expected_tokens
            np.testing.assert_allclose(
                np.frombuffer(logprobs, "<f4"), np.frombuffer(expected_logprobs, "<f4"), atol=1e-4
            )
        assert num_drafted_steps < num_steps
    assert replays, "no step with drafts was a graph"


def test_drafts_end_with_the_pages_and_with_the_context(tmp_path: Path) -> None:
    """Two requests of 12 tokens, for which there are pages, and a context of 13."""
    runner = drafting_runner(tmp_path, True, context_length=13)
    prompts = prompts_of([9, 8])
    pages = [[3, 1, 2, 7], [9, 4, 6]]  # one more page than the other has, of which a token is used
    new = [
        msgspec.structs.replace(one, pages=pack_ids(pages[one.slot]))
        for one in rows_of(prompts, no_rules, 1.0)
    ]
    expected = to_the_end(runner, new, [13, 12], 0)
    runner.drafter = FixedDrafter(runner, dict(enumerate(expected)), wrong_every=11)
    assert to_the_end(runner, new, [13, 12], 9) == expected


def to_the_end(
    runner: Runner, new: list[NewSlot], most: list[int], num_drafts: int
) -> list[list[int]]:
    """Generate until each slot has computed its tokens, and return what is known of it."""
    table = runner.table
    table.release_all()
    counts = pack_ids([len(one.token_ids) // 4 for one in new])
    plan = StepPlan(0, EXTEND, pack_ids([0, 1]), counts, new, b"")
    while plan.slots:
        runner.run(plan)
        slots = [slot for slot in (0, 1) if table.num_computed[slot] < most[slot]]
        drafts = pack_ids([num_drafts] * len(slots))
        ones = pack_ids([1] * len(slots))
        plan = StepPlan(1, DECODE, pack_ids(slots), ones, [], b"", num_guesses=drafts)
    assert table.num_computed[:2].tolist() == most
    return [table.known_tokens(slot, 0) for slot in (0, 1)]


@pytest.mark.parametrize("with_graphs", [True, False])
def test_a_row_drafts_beside_a_prompt(tmp_path: Path, with_graphs: bool) -> None:
    runner = drafting_runner(tmp_path, with_graphs)
    new = requests_of([no_rules, no_rules])
    answers = answers_of(new, generate(runner, new, 0, 5)[0])
    runner.drafter = FixedDrafter(runner, answers, 5)
    runner.table.release_all()
    runner.run(StepPlan(0, EXTEND, pack_ids([0]), pack_ids([3]), new[:1], b""))
    beside = StepPlan(
        1, MIXED, pack_ids([1, 0]), pack_ids([2, 1]), new[1:], b"", num_guesses=pack_ids([0, 3])
    )
    result = runner.run(beside)
    assert [(row.row, row.num_guesses) for row in result.guessed] == [(1, 3)]
    assert unpack_ids(result.token_ids)[0] == answers[1][2]
    for slot in (0, 1):
        known = runner.table.known_tokens(slot, 0)
        assert known == answers[slot][: len(known)]
    assert runner.table.num_known[0] == 6, "of the drafts at 4, 5 and 6 that at 5 is wrong"


def ngram_runner(directory: Path) -> Runner:
    """Return a runner that drafts from text, at most six samples in a step with drafts."""
    runner = drafting_runner(directory, False)
    runner.drafter = NgramDrafter(runner.table, max_samples=6)
    return runner


def decode_plan_of(slots: list[int], num_drafts: int) -> StepPlan:
    ones, drafts = pack_ids([1] * len(slots)), pack_ids([num_drafts] * len(slots))
    return StepPlan(1, DECODE, pack_ids(slots), ones, [], b"", num_guesses=drafts)


def test_the_host_waits_for_tokens_only_where_drafts_are_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, groups = ngram_runner(tmp_path), [b"a", b"b"]
    period = [7, 8, 9] * 4
    new = rows_of([period, period], no_rules, 0.0)
    slots, counts = pack_ids([0, 1]), pack_ids([12, 12])
    runner.run(StepPlan(0, EXTEND, slots, counts, new, b"", groups=groups))
    reads: list[int] = []
    read, execute, blocking = SlotTable.tokens_from, Engine.execute, []

    def watched(table: SlotTable, begins: dict[int, int]) -> dict[int, list[int]]:
        reads.append(len(begins))
        return read(table, begins)

    def executed(*args: Any) -> Any:
        pending = execute(*args)
        blocking.append(pending.blocks_next)
        return pending

    monkeypatch.setattr(SlotTable, "tokens_from", watched)
    monkeypatch.setattr(Engine, "execute", executed)
    for slot in (0, 1):
        runner.run(decode_plan_of([slot], 0))
    assert reads == [] and blocking == [False, False]
    drafter = cast(NgramDrafter, runner.drafter)
    for slot in (0, 1):  # the text goes on as it has
        drafter._slots[slot] = SlotText(groups[slot], 12)
        runner.table.tokens[slot, 12:14] = torch.tensor([7, 8])
    result = runner.run(decode_plan_of([0, 1], 9))
    assert reads == [2] and blocking[-1]
    assert sum(row.num_guesses for row in result.guessed) == 4, "with the two rows, six samples"
    drafter._max_samples = 2
    runner.run(decode_plan_of([0, 1], 9))
    assert reads == [2] and not blocking[-1], "there is no room for a draft"


def test_an_answer_that_ended_is_copied_behind_the_step_and_read_with_a_later_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = ngram_runner(tmp_path)
    prompt = prompts_of([12])[0]
    new = rows_of([prompt], no_rules, 0.0)
    count = pack_ids([12])
    runner.run(StepPlan(0, EXTEND, pack_ids([0]), count, new, b"", groups=[b"a"]))
    drafter, fetched = cast(NgramDrafter, runner.drafter), []
    drafter._slots[0].num_prompt = 0
    begin = runner.table.copier.begin

    def watched(values: Any) -> Any:
        fetch = begin(values)

        def waiting() -> Any:
            fetched.append(len(values))
            return fetch()

        return waiting

    monkeypatch.setattr(runner.table.copier, "begin", watched)
    release = StepPlan(1, DECODE, b"", b"", [], pack_ids([0]))
    runner.run(release)
    assert fetched == [] and drafter._recent.of(b"a") is None
    runner.table.tokens[0] = 0  # the slot has another request
    runner.run(StepPlan(2, DECODE, b"", b"", [], b""))
    answers = drafter._recent.of(b"a")
    assert fetched == [13] and answers is not None and answers.tokens[:12] == prompt


def test_ngram_drafts_from_text_that_repeats(tmp_path: Path) -> None:
    runner = drafting_runner(tmp_path, False, context_length=8)
    assert drafts.prepare_drafts(runner, ServerConfig().replace(**NGRAM), 1) == []
    assert isinstance(runner.drafter, NgramDrafter) and not runner.table.held


@pytest.mark.parametrize(
    ("method", "stores_tokens", "ranks", "reason"),
    [
        ("auto", True, 1, "makes most answers slower; --speculative-method ngram drafts"),
        ("ngram", False, 1, "the engine x drafts on a CPU only, the device is cuda:0"),
        ("ngram", True, 2, "one process only, tp is 2"),
        ("ngram", True, 1, ""),
    ],
)
def test_what_cannot_draft_on_a_gpu_says_why(
    method: str, stores_tokens: bool, ranks: int, reason: str
) -> None:
    engine = SimpleNamespace(name="x", supports_drafts=True, stores_tokens=stores_tokens)
    table = SimpleNamespace(device=torch.device("cuda:0"))
    runner = cast(Runner, SimpleNamespace(engine=engine, table=table))
    refusal = drafts._refusal(runner, method, ranks)
    assert reason in refusal and bool(refusal) == bool(reason)


def test_a_model_does_not_draft_for_itself_on_a_gpu() -> None:
    config = ServerConfig().replace(speculative_method="self")
    with pytest.raises(ConfigError, match=r"on cuda:1: take --speculative-method ngram"):
        wants_draft(config, torch.device("cuda:1"), False)


def test_the_flag_makes_graphs_with_room_for_drafts(tmp_path: Path) -> None:
    flags = {"device": str(DEVICE), "attention_backend": "triton", "max_batch_size": 2}
    directory = small_llama(tmp_path)
    num_samples = []
    for method in ("none", "ngram"):
        engine = runner_of(directory, **flags, speculative_method=method).engine
        num_samples.append(cast(TritonEngine, engine)._min_samples)
    assert num_samples == [0, 64]
