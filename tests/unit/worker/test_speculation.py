"""Drafted tokens: what is drafted, and that answers are the same with drafts and without."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from quadriga.sampling.params import Grammar
from quadriga.server.grammars.grammar import to_library_form
from quadriga.wire.grammar import GrammarForm
from quadriga.wire.packing import pack_ids
from quadriga.wire.worker import (
    DECODE,
    EXTEND,
    NewSlot,
    SlotSamplingParams,
    StepPlan,
    StepResult,
)
from tests.unit.drafting import FixedDrafter, generate, no_rules, penalties, rows_of, with_logprobs
from tests.unit.tiny_vocabulary import tiny_vocabulary
from tests.unit.worker_driver import prompts_of, runner_of
from worker_proc.sampling.grammar import compile_form
from worker_proc.speculation.ngram import (
    MAX_GROUPS,
    MAX_MATCH,
    MAX_TOKENS,
    Match,
    NgramDrafter,
    RecentAnswers,
    TextIndex,
)
from worker_proc.step.runner import Runner


@pytest.mark.parametrize(
    "flags",
    [
        {"attention_backend": "torch"},
        {},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "quantization": "int4"},
    ],
)
@pytest.mark.parametrize("rules", [no_rules, penalties, with_logprobs])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_the_same_with_right_and_wrong_drafts(
    llama_dir: Path,
    flags: dict[str, str],
    rules: Callable[[int], SlotSamplingParams | None],
    temperature: float,
) -> None:
    runner = runner_of(llama_dir, **flags)
    prompts = prompts_of([5, 9, 1])
    new = rows_of(prompts, rules, temperature)
    expected, num_steps = generate(runner, new, 0)
    answers = {slot: prompts[slot] + tokens for slot, (tokens, _) in enumerate(expected)}
    for wrong_every in (3, 7, 1000):
        runner.drafter = FixedDrafter(runner, answers, wrong_every)
        got, num_drafted_steps = generate(runner, new, 4)
        assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
        for (_, values), (_, expected_values) in zip(got, expected, strict=True):
            if "attention_backend" not in flags:  # a token has the same bits in every step
                assert values == expected_values
            np.testing.assert_allclose(
                np.frombuffer(values, "<f4"), np.frombuffer(expected_values, "<f4"), atol=1e-4
            )
        assert num_drafted_steps < num_steps


@pytest.mark.parametrize("jumps", [True, False])
def test_a_grammar_gives_the_same_answer_with_drafts(llama_dir: Path, jumps: bool) -> None:
    vocabulary = tiny_vocabulary(llama_dir, 512)
    grammar = to_library_form(Grammar("regex", "([A-D] quick brown fox )+"), vocabulary)
    form = GrammarForm.of(grammar, None)
    runner = runner_of(llama_dir)
    runner.table.sampling.compiled = {form.key: compile_form(vocabulary, form)}
    prompts = prompts_of([5, 9])

    def rules(num_prompt: int) -> SlotSamplingParams:
        return SlotSamplingParams(num_prompt, stop_ids=pack_ids([2]), grammar=form.key, jumps=jumps)

    new = rows_of(prompts, rules, 1.0)
    expected, _ = generate(runner, new, 0)
    answers = {slot: prompts[slot] + tokens for slot, (tokens, _) in enumerate(expected)}
    for wrong_every in (4, 1000):
        runner.drafter = FixedDrafter(runner, answers, wrong_every)
        assert generate(runner, new, 5)[0] == expected


def test_a_draft_leaves_room_for_a_step_that_is_planned_already(llama_dir: Path) -> None:
    runner = runner_of(llama_dir)
    prompts = prompts_of([6])
    new = rows_of(prompts, no_rules, 0.0)
    (expected, _), *_ = generate(runner, new, 0)[0]
    runner.drafter = FixedDrafter(runner, {0: prompts[0] + expected}, 1000)
    runner.table.release_all()
    small = [NewSlot(0, pack_ids(prompts[0]), 0, pack_ids([3, 1, 2]), 0.0, -1, 1.0, 0)]
    runner.run(StepPlan(0, EXTEND, pack_ids([0]), pack_ids([6]), small, b""))

    def decode() -> StepResult:
        nine = pack_ids([9])
        return runner.run(
            StepPlan(1, DECODE, pack_ids([0]), pack_ids([1]), [], b"", num_guesses=nine)
        )

    result = decode()
    (drafted,) = result.guessed
    assert drafted.num_guesses == len(drafted.token_ids) // 4 == 12 - 1 - 7
    assert runner.table.num_computed[0] == 11
    result = decode()
    assert result.guessed == []
    assert runner.table.num_computed[0] == 12


# --- what is drafted ------------------------------------------------------------------------------


def test_the_longer_match_is_found_first_and_the_own_end_is_none() -> None:
    text = TextIndex([1, 2, 3, 4, 9, 3, 4, 8, 1, 2, 3, 4])
    assert text.find(text.tokens) == Match(4, 4)
    assert text.find([7, 3, 4]) == Match(7, 2)
    assert text.find([4, 3]) is None
    assert text.find([3]) is None
    assert TextIndex([5] * 40).find([5] * 40) == Match(39, MAX_MATCH)


def test_a_text_is_found_however_it_grew() -> None:
    tokens = [1, 2, 3, 4, 5, 1, 2, 3, 4]
    for cut in range(len(tokens)):
        text = TextIndex(tokens[:cut])
        text.extend(tokens[cut:])
        assert text.find(text.tokens) == Match(4, 4)
        assert text.after(4, 3, repeats=False) == [5, 1, 2]


def test_a_long_text_is_indexed_as_a_short_one() -> None:
    tokens = prompts_of([500], vocab_size=40)[0]
    whole, by_token = TextIndex(tokens), TextIndex()
    for token in tokens:
        by_token.extend([token])
    for end in range(2, 500):
        assert whole.find(tokens[:end]) == by_token.find(tokens[:end])


def test_drafts_repeat_a_period_and_end_with_a_text() -> None:
    text = TextIndex([1, 2, 1, 2])
    assert text.after(2, 5, repeats=True) == [1, 2, 1, 2, 1]
    assert TextIndex([1, 2, -1, 3]).after(0, 9, repeats=False) == [1, 2]


def test_recent_answers_are_bounded_and_belong_to_their_group() -> None:
    recent = RecentAnswers()
    recent.add(b"a", list(range(10, 30)))
    recent.add(b"b", [1, 2, 3])  # too short to be of use
    found = recent.of(b"a")
    assert found is not None
    assert found.find([12, 13, 14, 15]) == Match(6, 4)
    assert recent.of(b"b") is None
    for number in range(20):
        recent.add(b"long", [number] * 3000)
    longest = recent.of(b"long")
    assert longest is not None
    assert len(longest.tokens) <= MAX_TOKENS
    for number in range(2 * MAX_GROUPS):
        recent.add(b"%d" % number, list(range(20)))
    assert recent.of(b"a") is None


def run_prompt(runner: Runner, prompt: Sequence[int], group: bytes, num_steps: int) -> list[int]:
    """Generate greedily with drafts, release the slot, and return the drafts of each step."""
    new = rows_of([list(prompt)], no_rules, 0.0)
    plan = StepPlan(0, EXTEND, pack_ids([0]), pack_ids([len(prompt)]), new, b"", groups=[group])
    counts = []
    for step in range(num_steps):
        result = runner.run(plan)
        counts += [row.num_guesses for row in result.guessed]
        plan = StepPlan(
            step, DECODE, pack_ids([0]), pack_ids([1]), [], b"", num_guesses=pack_ids([4])
        )
    runner.run(StepPlan(0, DECODE, b"", b"", [], pack_ids([0])))
    return counts


def test_an_answer_is_drafted_from_the_last_one_of_its_group_only(llama_dir: Path) -> None:
    runner = runner_of(llama_dir)
    runner.drafter = NgramDrafter(runner.table)
    prompt = prompts_of([3])[0]
    first = sum(run_prompt(runner, prompt, b"a", 30))
    again = sum(run_prompt(runner, prompt, b"b", 30))
    same_group = sum(run_prompt(runner, prompt, b"a", 8))
    assert again == first, "another group's answer was used"
    assert same_group > 0
