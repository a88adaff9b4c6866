"""Rows with grammars on the engine for a GPU: the next step is launched before they are masked."""

import json
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from llguidance import LLTokenizer

from quadriga.sampling.params import Grammar
from quadriga.server.grammars.grammar import to_library_form
from quadriga.wire.grammar import GrammarForm, ThinkingForm
from quadriga.wire.packing import pack_ids, unpack_ids
from quadriga.wire.worker import (
    DECODE,
    EXTEND,
    NewSlot,
    SlotSamplingParams,
    StepPlan,
    StepResult,
)

from tests.triton_device import DEVICE  # isort: skip (before what it has to precede)

from tests.unit.drafting import FixedDrafter, rows_of
from tests.unit.gpu.graphs import capture, runner_with, small_llama
from tests.unit.tiny_vocabulary import tiny_vocabulary
from tests.unit.worker_driver import prompts_of, runner_of
from worker_proc.gpu.engine import TritonEngine
from worker_proc.gpu.kernels.sampling import mask_forbidden
from worker_proc.result_sender import AsyncResultSender
from worker_proc.sampling.grammar import (
    MASKED,
    Constrained,
    compile_form,
    compute_in_parallel,
    compute_in_turn,
    mask_packed,
    masks_of,
)
from worker_proc.step.runner import Runner

VOCAB_SIZE, STOP = 512, 0
NUM_TOKENS = 9
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
Rules = Callable[[int], SlotSamplingParams | None]
Wait = Callable[[], StepResult]


def form(
    vocabulary: LLTokenizer, kind: str, text: str, thinking: ThinkingForm | None = None
) -> GrammarForm:
    grammar = to_library_form(Grammar(kind, text), vocabulary) if text else ""
    return GrammarForm.of(grammar, thinking)


class Forms:
    """Grammars of every kind, compiled, and rows that have them."""

    def __init__(self, directory: Path) -> None:
        self.vocabulary = tiny_vocabulary(directory, VOCAB_SIZE)
        reasoning = ThinkingForm("</think>", budget=2)
        self.of = {
            "json": form(self.vocabulary, "json_schema", json.dumps(SCHEMA)),
            "regex": form(self.vocabulary, "regex", "([A-D] quick brown fox )+"),
            "ends": form(self.vocabulary, "regex", "[XY]{3}"),
            "reasoning": form(self.vocabulary, "regex", "", reasoning),
            "reasoning, then regex": form(self.vocabulary, "regex", "[0-9]{2,9}", reasoning),
        }
        self.compiled = {one.key: compile_form(self.vocabulary, one) for one in self.of.values()}

    def rules(self, kind: str, **further: Any) -> Rules:
        def of_prompt(num_prompt: int) -> SlotSamplingParams | None:
            if kind == "free":
                return SlotSamplingParams(num_prompt, **further) if further else None
            key = self.of[kind].key
            stop = pack_ids([STOP])
            return SlotSamplingParams(num_prompt, stop_ids=stop, grammar=key, **further)

        return of_prompt

    def give_to(self, runner: Runner) -> Runner:
        runner.table.sampling.compiled = self.compiled
        return runner


def requests_of(rules: Sequence[Rules]) -> list[NewSlot]:
    """Return a greedy request and drawn ones, with these rules."""
    prompts = prompts_of([3, 2, 1, 2, 2, 1][: len(rules)])
    new = [rows_of(prompts, one, 1.0)[slot] for slot, one in enumerate(rules)]
    return [msgspec.structs.replace(new[0], temperature=0.0), *new[1:]]


def plans_of(new: list[NewSlot], num_steps: int, num_drafts: int = 0) -> list[StepPlan]:
    """Return steps of requests, planned before there are results; every third one has drafts."""
    slots = pack_ids(one.slot for one in new)
    counts = pack_ids(len(one.token_ids) // 4 for one in new)
    ones, drafts = pack_ids([1] * len(new)), pack_ids([num_drafts] * len(new))
    return [
        StepPlan(0, EXTEND, slots, counts, new, b""),
        *(
            StepPlan(
                step, DECODE, slots, ones, [], b"", num_guesses=drafts if step % 3 == 2 else b""
            )
            for step in range(1, num_steps)
        ),
    ]


def run_ahead(runner: Runner, plans: Sequence[StepPlan], num_ahead: int) -> list[StepResult]:
    """Launch steps as the worker does, so many before the result of the first one is waited for."""
    results: list[StepResult] = []
    waiting: deque[Wait] = deque()
    with torch.inference_mode():
        for plan in plans:
            waiting.append(runner.launch(plan))
            if len(waiting) > num_ahead:
                results.append(waiting.popleft()())
    return [*results, *(wait() for wait in waiting)]


def tokens_of(results: Sequence[StepResult], num_rows: int) -> list[list[int]]:
    """Return the tokens of each row up to a stop token."""
    tokens: list[list[int]] = [[] for _ in range(num_rows)]
    for result in results:
        for row, token in enumerate(unpack_ids(result.token_ids)):
            tokens[row].append(token)
        for drafted in result.guessed:
            tokens[drafted.row] += unpack_ids(drafted.token_ids)
    return [row[: row.index(STOP) + 1] if STOP in row else row for row in tokens]


def reference(
    directory: Path, forms: Forms, new: list[NewSlot], backend: str, num_steps: int = NUM_TOKENS
) -> list[list[int]]:
    runner = forms.give_to(runner_of(directory, attention_backend=backend))
    return tokens_of(run_ahead(runner, plans_of(new, num_steps), 0), len(new))


def triton_runner(directory: Path, forms: Forms, with_graphs: bool, drafts: bool = False) -> Runner:
    captured = capture() if with_graphs else None
    return forms.give_to(runner_with(directory, captured, drafts=drafts))


KINDS = [
    pytest.param(("json", "free", "reasoning, then regex"), True, id="graphs"),
    pytest.param(("regex", "reasoning", "free"), True, id="graphs, reasoning that becomes free"),
    pytest.param(("json", "free", "ends", "reasoning"), False, id="kernels"),
]


@pytest.mark.parametrize(("kinds", "with_graphs"), KINDS)
def test_answers_are_those_of_other_engines_however_far_the_host_is_behind(
    tmp_path: Path, kinds: tuple[str, ...], with_graphs: bool
) -> None:
    directory = small_llama(tmp_path)
    forms = Forms(directory)
    new = requests_of([forms.rules(kind) for kind in kinds])
    expected = reference(directory, forms, new, "native")
    assert expected == reference(directory, forms, new, "torch")
    runner = triton_runner(directory, forms, with_graphs)
    for num_ahead in (0, 1, NUM_TOKENS):  # a rank beside rank 0 waits for no result
        runner.table.release_all()
        results = run_ahead(runner, plans_of(new, NUM_TOKENS), num_ahead)
        assert tokens_of(results, len(new)) == expected
        check_known(runner, new, results)


def check_known(runner: Runner, new: list[NewSlot], results: list[StepResult]) -> None:
    """Check that the table of known tokens has those of the results."""
    for row, one in enumerate(new):
        sampled = [unpack_ids(result.token_ids)[row] for result in results]
        assert runner.table.known_tokens(one.slot, 0) == [*unpack_ids(one.token_ids), *sampled]


def test_rules_beside_a_grammar_and_rows_without_one_give_what_other_engines_give(
    tmp_path: Path,
) -> None:
    directory = small_llama(tmp_path)
    forms = Forms(directory)
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logprobs": 2}
    rules = [
        forms.rules("json", **penalties),
        forms.rules("free", **penalties),
        forms.rules("free"),
    ]
    new = requests_of(rules)
    plans = plans_of(new, 5)
    reference_runner = forms.give_to(runner_of(directory, attention_backend="torch"))
    expected = run_ahead(reference_runner, plans, 0)
    results = run_ahead(triton_runner(directory, forms, True), plans, 1)
    assert tokens_of(results, len(new)) == tokens_of(expected, len(new))
    for result, other in zip(results, expected, strict=True):
        assert result.logprobs is not None and other.logprobs is not None
        assert result.logprobs.rows == other.logprobs.rows
        got, right = result.logprobs.block, other.logprobs.block
        assert got.top_ids == right.top_ids
        values = np.frombuffer(got.values, "<f4")
        np.testing.assert_allclose(values, np.frombuffer(right.values, "<f4"), atol=1e-4)


def note_events(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the steps' forwards, masked samples and tokens on the host."""
    events: list[str] = []
    engine, copier = cast(TritonEngine, runner.engine), runner.table.copier
    replay, sample_again, begin = engine._replay, engine._sample_again, copier.begin_all
    num_copies = 0

    def replaying(inputs: Any) -> Any:
        events.append("forward")
        return replay(inputs)

    def sampling(*args: Any) -> None:
        events.append("mask")
        sample_again(*args)

    def beginning(*arrays: Any) -> Any:
        nonlocal num_copies
        number, fetch = num_copies, begin(*arrays)
        num_copies += 1

        def fetching() -> Any:
            events.append(f"token {number}")
            return fetch()

        return fetching

    monkeypatch.setattr(engine, "_replay", replaying)
    monkeypatch.setattr(engine, "_sample_again", sampling)
    monkeypatch.setattr(copier, "begin_all", beginning)
    return events


def test_a_step_is_launched_before_the_host_has_the_tokens_of_the_step_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = small_llama(tmp_path)
    forms = Forms(directory)
    runner = triton_runner(directory, forms, True)
    events = note_events(runner, monkeypatch)
    new = requests_of([forms.rules("json"), forms.rules("free")])
    run_ahead(runner, plans_of(new, 3), 3)
    assert events == [
        "forward", "mask",
        "forward", "token 0", "mask",
        "forward", "token 1", "mask",
        "token 2",
    ]  # fmt: skip


def test_a_step_without_grammars_waits_for_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the step before had one, and if a reasoning before a free answer is over."""
    directory = small_llama(tmp_path)
    forms = Forms(directory)
    runner = triton_runner(directory, forms, True)
    new = requests_of([forms.rules("json"), forms.rules("free"), forms.rules("reasoning")])
    with torch.inference_mode():
        plans = plans_of(new, 12)
        run_ahead(runner, plans, 0)
        events = note_events(runner, monkeypatch)
        over = decode(pack_ids([1, 2]))
        results = run_ahead(runner, [plans[1], over, over], 3)
    assert events == ["forward", "mask", "forward", "forward", "token 0", "token 1", "token 2"]
    assert len(results) == 3


def decode(slots: bytes, **changes: bytes) -> StepPlan:
    ones = pack_ids([1] * (len(slots) // 4))
    return msgspec.structs.replace(StepPlan(9, DECODE, slots, ones, [], b""), **changes)


def test_results_come_in_order_from_a_thread_that_waits_beside_the_launches(tmp_path: Path) -> None:
    directory = small_llama(tmp_path)
    forms = Forms(directory)
    new = requests_of([forms.rules("json"), forms.rules("regex"), forms.rules("free")])
    expected = reference(directory, forms, new, "torch")
    runner = triton_runner(directory, forms, True)
    sent: list[Any] = []
    errors: list[BaseException] = []
    sender = AsyncResultSender(sent.append, errors.append)
    with torch.inference_mode():
        for plan in plans_of(new, NUM_TOKENS):
            sender.send(runner.launch(plan))
    sender.close()
    assert not errors and [result.step for result in sent] == list(range(NUM_TOKENS))
    assert tokens_of(sent, len(new)) == expected


def test_a_slot_gets_another_request_before_the_host_has_its_last_token(tmp_path: Path) -> None:
    directory = small_llama(tmp_path)
    forms = Forms(directory)
    new = requests_of([forms.rules("json"), forms.rules("ends")])
    expected = reference(directory, forms, new, "torch", 4)
    runner = triton_runner(directory, forms, True)
    first = plans_of([msgspec.structs.replace(new[0], rules=forms.rules("regex")(3)), new[1]], 2)
    again = msgspec.structs.replace(plans_of(new, 1)[0], released=pack_ids([0, 1]))
    plans = [*first, again, *plans_of(new, 4)[1:]]
    results = run_ahead(runner, plans, len(plans))
    assert tokens_of(results[2:], 2) == expected
    assert all(result.failed == [] for result in results)


def test_a_row_without_an_allowed_token_fails_alone_in_its_own_step(tmp_path: Path) -> None:
    directory = small_llama(tmp_path)
    forms = Forms(directory)
    (z,) = forms.vocabulary.tokenize_str("Z")
    barred = forms.rules("ends", allowed_ids=pack_ids([z]))
    new = requests_of([forms.rules("json"), barred])
    expected = reference(directory, forms, new[:1], "torch", 4)
    results = run_ahead(triton_runner(directory, forms, True), plans_of(new, 4), 2)
    assert [[row.row for row in result.failed] for result in results] == [[1]] * 4
    assert "no token is left" in results[0].failed[0].error
    assert tokens_of(results, 2)[0] == expected[0]


@pytest.mark.parametrize("with_graphs", [True, False])
def test_drafts_change_no_answer_with_a_grammar_nor_of_rows_beside_it(
    tmp_path: Path, with_graphs: bool
) -> None:
    """A step with drafts follows one whose tokens the host has not seen."""
    directory = small_llama(tmp_path)
    forms = Forms(directory)
    rules = [forms.rules("regex"), forms.rules("free"), forms.rules("free", presence_penalty=0.5)]
    new = requests_of(rules)
    expected = reference(directory, forms, new, "torch", 14)
    runner = triton_runner(directory, forms, with_graphs, drafts=True)
    runner.table._host_tokens = None  # slots are read and written as they are on a GPU
    answers = {
        one.slot: [*unpack_ids(one.token_ids), *tokens]
        for one, tokens in zip(new, expected, strict=True)
    }
    runner.drafter = FixedDrafter(runner, answers, wrong_every=4)
    results = run_ahead(runner, plans_of(new, 6, num_drafts=2), 1)
    assert any(drafted.token_ids for result in results for drafted in result.guessed)
    for row, tokens in enumerate(tokens_of(results, len(new))):
        assert len(tokens) >= 6 and tokens == expected[row][: len(tokens)]
        known = runner.table.known_tokens(new[row].slot, 0)
        assert known == answers[new[row].slot][: len(known)]


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 9001])
def test_the_kernel_masks_what_plain_torch_masks(vocab_size: int) -> None:
    num_bytes = -(-vocab_size // 32) * 4
    masks = np.random.default_rng(1).integers(0, 256, (3, num_bytes), dtype=np.uint8)
    rows, scores = torch.tensor([3, 0, 4]), torch.randn(5, vocab_size)
    expected = scores.clone()
    mask_packed(expected, rows, torch.from_numpy(masks))
    assert (expected[3] == MASKED).any() and (expected[1] != MASKED).all()
    got = scores.to(DEVICE)
    mask_forbidden(got, rows.to(DEVICE), torch.from_numpy(masks).to(DEVICE))
    assert got.cpu().equal(expected)


def test_masks_that_threads_compute_are_those_of_one(llama_dir: Path) -> None:
    forms = Forms(llama_dir)
    kinds = [*("json", "regex", "ends", "reasoning, then regex") * 3, "reasoning"]
    states = [
        forms.compiled[forms.of[kind].key].begin(np.array([STOP]), np.array([], np.int64), False)
        for kind in kinds
    ]
    assert states[1].advance(forms.vocabulary.tokenize_str("Z")[0]) != "", "it has given up"
    rows = [Constrained(row, state) for row, state in enumerate(states)]
    numbers, masks = masks_of(rows, VOCAB_SIZE, compute_in_turn)
    others, in_parallel = masks_of(rows, VOCAB_SIZE, compute_in_parallel)
    assert numbers.tolist() == others.tolist() == list(range(12)), "a free reasoning masks nothing"
    assert (masks == in_parallel).all() and masks.any() and not masks[1].any()
