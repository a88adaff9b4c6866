"""A model that drafts its own tokens in 4 bits: the same answers, in fewer steps."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from quadriga.errors import ConfigError
from quadriga.sampling.params import Grammar
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.grammars.grammar import to_library_form
from quadriga.wire.grammar import GrammarForm
from quadriga.wire.packing import pack_ids
from quadriga.wire.worker import (
    DECODE,
    EXTEND,
    SlotSamplingParams,
    StepPlan,
)
from tests.tiny_experts import EXPERTS
from tests.unit.drafting import generate, no_rules, penalties, rows_of, with_logprobs
from tests.unit.tiny_vocabulary import tiny_vocabulary
from tests.unit.worker_driver import prompts_of, runner_of
from worker_proc.sampling.grammar import compile_form
from worker_proc.speculation.self_draft import SelfDrafter
from worker_proc.startup.drafts import prepare_drafts
from worker_proc.step.runner import Runner

SELF = {"speculative_method": "self"}
FORMATS = [
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "quantization": "int8"},
    {"dtype": "bfloat16", "kv_cache_dtype": "int8", "page_size": 16},
]


def drafting_runner(directory: Path, **flags: object) -> Runner:
    runner = runner_of(directory, **SELF, **flags)
    assert runner.engine.draft is not None
    runner.drafter = SelfDrafter(runner.table, runner.engine.draft)
    return runner


@pytest.mark.parametrize("flags", FORMATS)
@pytest.mark.parametrize("rules", [no_rules, penalties, with_logprobs])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_those_of_a_model_that_drafts_nothing(
    llama_dir: Path,
    flags: dict[str, object],
    rules: Callable[[int], SlotSamplingParams | None],
    temperature: float,
) -> None:
    new = rows_of(prompts_of([5, 9, 1]), rules, temperature)
    if "page_size" in flags:
        new = [msgspec.structs.replace(one, pages=one.pages[:16]) for one in new]
    expected, num_steps = generate(runner_of(llama_dir, **flags), new, 0)
    runner = drafting_runner(llama_dir, **flags)
    for num_drafts in (1, 4):
        got, num_drafting_steps = generate(runner, new, num_drafts)
        assert got == expected
        assert num_drafting_steps < num_steps
    assert generate(runner, new, 0) == (expected, num_steps), "drafts left something behind"


def test_drafts_of_gpt2_and_of_experts_give_the_same_answers(
    gpt2_dir: Path, tmp_path: Path
) -> None:
    for directory in (gpt2_dir, EXPERTS["mixtral"](tmp_path)):
        new = rows_of(prompts_of([5, 9]), no_rules, 0.0)
        expected, num_steps = generate(runner_of(directory), new, 0)
        got, num_drafting_steps = generate(drafting_runner(directory), new, 4)
        assert got == expected
        assert num_drafting_steps < num_steps


def test_rows_of_one_step_draft_different_numbers_of_tokens(llama_dir: Path) -> None:
    runner = drafting_runner(llama_dir)
    prompts = prompts_of([5, 9, 3])
    new = rows_of(prompts, no_rules, 0.0)
    slots, lengths = pack_ids([0, 1, 2]), pack_ids([len(prompt) for prompt in prompts])
    runner.run(StepPlan(0, EXTEND, slots, lengths, new, b""))
    ones, numbers = pack_ids([1, 1, 1]), pack_ids([0, 3, 1])
    plan = StepPlan(1, DECODE, slots, ones, [], b"", num_guesses=numbers)
    result = runner.run(plan)
    assert {row.row: row.num_guesses for row in result.guessed} == {1: 3, 2: 1}
    known, computed = runner.table.num_known[:3], runner.table.num_computed[:3]
    assert (known == computed + 1).all()
    num_right = np.zeros(3, dtype=np.int64)
    for row in result.guessed:
        num_right[row.row] = len(row.token_ids) // 4
    assert (known == np.array([len(prompt) for prompt in prompts]) + 2 + num_right).all()


def test_a_draft_with_the_weights_of_the_model_is_always_right(llama_dir: Path) -> None:
    runner = runner_of(llama_dir)
    runner.drafter = SelfDrafter(runner.table, runner.engine)
    new = rows_of(prompts_of([5, 9]), no_rules, 1.0)
    _, num_steps = generate(runner, new, 4)
    assert num_steps == 1 + 8, "each step after the prompts brings five of 40 tokens"


def test_a_grammar_is_followed_without_drafts(llama_dir: Path) -> None:
    vocabulary = tiny_vocabulary(llama_dir, 512)
    grammar = to_library_form(Grammar("regex", "([A-D] quick brown fox )+"), vocabulary)
    form = GrammarForm.of(grammar, None)
    new = rows_of(
        prompts_of([5, 9]),
        lambda num_prompt: SlotSamplingParams(
            num_prompt, stop_ids=pack_ids([2]), grammar=form.key, jumps=True
        ),
        1.0,
    )
    answers = []
    for runner in (runner_of(llama_dir), drafting_runner(llama_dir)):
        runner.table.sampling.compiled = {form.key: compile_form(vocabulary, form)}
        answers.append(generate(runner, new, 4))
    assert answers[0] == answers[1]


def test_the_steps_that_draft_are_measured(llama_dir: Path) -> None:
    config = ServerConfig().replace(**SELF)
    runner = drafting_runner(llama_dir)
    costs = prepare_drafts(runner, config, 1)
    assert costs is not None and isinstance(runner.drafter, SelfDrafter)
    assert [cost.num_rows for cost in costs] == [1, 2, 4, 8]
    assert all(cost.seconds > 0 for cost in costs)
    assert not runner.table.held


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"quantization": "int4"}, "quantization int4"),
        ({"quantization": "gguf"}, "quantization gguf"),
        ({"attention_backend": "torch"}, "attention_backend torch"),
        ({"tp": 2}, "tp 2"),
    ],
)
def test_flags_that_leave_nothing_to_draft_with_are_refused(
    flags: dict[str, object], named: str
) -> None:
    config = ServerConfig().replace(**SELF, **flags)
    with pytest.raises(ConfigError, match=rf"{named}: take --speculative-method auto"):
        config.validate()


def test_a_model_that_the_native_kernels_do_not_compute_is_refused(llama_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"do not compute this model on cpu: take"):
        runner_of(llama_dir, **SELF, attention_backend="torch")
