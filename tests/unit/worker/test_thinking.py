"""Reasoning is closed after its budget, and a grammar begins after it, in whatever tokens."""

from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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
)
from tests.unit.tiny_vocabulary import tiny_vocabulary
from tests.unit.worker_driver import prompts_of, runner_of
from worker_proc.sampling.grammar import (
    MASKED,
    Constrained,
    MarkScanner,
    MarkState,
    SlotConstraint,
    ThinkingMarks,
    compile_form,
    mask_by_grammar,
)
from worker_proc.step.runner import Runner

VOCAB_SIZE = 515
STOP = 0
END, START = "</think>", "<think>"
EVERY = set(range(VOCAB_SIZE))


@pytest.fixture(scope="module")
def vocabulary(llama_dir: Path) -> LLTokenizer:
    return tiny_vocabulary(llama_dir, VOCAB_SIZE, ">!")


def slot(
    vocabulary: LLTokenizer,
    *generated: int,
    regex: str = "",
    end: str = END,
    start: str = "",
    budget: int | None = None,
    jump_forward: bool = False,
) -> SlotConstraint:
    """Return the state of a slot; with `start` the prompt does not have it."""
    grammar = to_library_form(Grammar("regex", regex), vocabulary) if regex else ""
    form = GrammarForm.of(grammar, ThinkingForm(end, start, not start, budget))
    compiled = compile_form(vocabulary, form)
    known = np.array(generated, dtype=np.int64)
    return compiled.begin(np.array([STOP]), known, jump_forward)


def allowed(constraint: SlotConstraint) -> set[int]:
    """Return the tokens that may come next."""
    scores = torch.zeros(1, VOCAB_SIZE)
    mask_by_grammar(scores, [Constrained(0, constraint)])
    return set((scores[0] != MASKED).nonzero().flatten().tolist())


def feed(constraint: SlotConstraint, token_ids: list[int]) -> list[set[int]]:
    """Accept tokens; return what was allowed before each of them, and after the last."""
    states = [allowed(constraint)]
    for token in token_ids:
        assert constraint.advance(token) == ""
        states.append(allowed(constraint))
    return states


def split(vocabulary: LLTokenizer, text: str) -> list[int]:
    """Return a token for each character of an ASCII text."""
    return [vocabulary.tokenize_str(character)[0] for character in text]


@given(st.text("ab", min_size=1, max_size=5), st.lists(st.text("ab", max_size=4), max_size=12))
@settings(deadline=None)
def test_a_mark_is_found_where_the_text_has_it_however_it_is_split(
    mark: str, pieces: list[str]
) -> None:
    scanner, scanned, text = MarkScanner(mark), MarkState(0), ""
    for piece in pieces:
        scanned = scanner.scan(scanned.num_matched, piece.encode())
        end = (text + piece).find(mark)
        if end >= 0:
            after = len(text) + len(piece) - end - len(mark)
            assert scanned == (len(mark), after) and scanner.is_complete(scanned)
            return
        text += piece
        longest = max(n for n in range(len(mark)) if text.endswith(mark[:n]))
        assert scanned == (longest, 0)


@given(
    st.text("ab", min_size=1, max_size=6),
    st.lists(st.text("abc", min_size=1, max_size=8), max_size=20),
)
def test_tokens_that_go_on_after_a_mark_are_those_that_a_scan_finds(
    mark: str, texts: list[str]
) -> None:
    scanner, tokens = MarkScanner(mark), [text.encode() for text in texts]
    found = [ids.tolist() for ids in scanner.overshooting(tokens)]
    assert found == [
        [token for token, data in enumerate(tokens) if scanner.scan(matched, data).num_after]
        for matched in range(len(scanner.mark))
    ]


@pytest.mark.parametrize("mark", ["◁/think▷", "<|end|><|start|>assistant<|message|>"])
def test_any_part_of_a_mark_is_completed(vocabulary: LLTokenizer, mark: str) -> None:
    data = mark.encode()
    marks = ThinkingMarks("", mark, vocabulary, has_grammar=True)
    for length in range(len(data)):
        rest = vocabulary.decode_bytes(marks.closing(length))
        assert (data[:length] + rest).endswith(data)


def test_a_mark_of_one_token_is_found_also_where_its_letters_are_written(llama_dir: Path) -> None:
    special = tiny_vocabulary(llama_dir, VOCAB_SIZE, START, END)
    (end,) = special.tokenize_str(END)
    (start,) = special.tokenize_str(START)
    closed = slot(special, budget=2)
    assert feed(closed, [*split(special, "ab"), end])[2:] == [{end}, EVERY]
    assert feed(slot(special, regex="X"), split(special, END))[-1] == set(split(special, "X"))
    opened = slot(special, regex="X", start=START, budget=1)
    assert allowed(opened) == {start, *split(special, "X")}
    assert feed(opened, [start, *split(special, "a"), end])[1:] == [
        EVERY - {STOP}, {end}, set(split(special, "X")),
    ]  # fmt: skip


def test_the_reasoning_is_closed_after_its_budget_and_then_every_token_is_allowed(
    vocabulary: LLTokenizer,
) -> None:
    thoughts, closing = split(vocabulary, "abc"), vocabulary.tokenize_str(f"\n{END}\n\n")
    constraint = slot(vocabulary, budget=3, end=f"\n{END}\n\n")
    states = feed(constraint, thoughts + closing)
    assert states == [EVERY] * 3 + [{token} for token in closing] + [EVERY]
    assert constraint.is_over


def test_a_budget_of_0_closes_the_reasoning_at_once(vocabulary: LLTokenizer) -> None:
    closing = vocabulary.tokenize_str(END)
    inside = slot(vocabulary, budget=0)
    assert feed(inside, closing) == [{token} for token in closing] + [EVERY]
    start = vocabulary.tokenize_str(START)
    opened = slot(vocabulary, budget=0, start=START)
    assert feed(opened, start + closing)[len(start) :] == [{token} for token in closing] + [EVERY]


def test_a_reasoning_that_ends_by_itself_is_not_closed(vocabulary: LLTokenizer) -> None:
    for end in (vocabulary.tokenize_str(END), split(vocabulary, END)):
        constraint = slot(vocabulary, budget=20, end=f"\n{END}")
        thoughts = split(vocabulary, "a</thin")
        assert feed(constraint, thoughts + end + split(vocabulary, "b" * 30))[-1] == EVERY
        assert constraint.is_over


def test_a_mark_that_was_begun_when_the_budget_ends_is_completed(vocabulary: LLTokenizer) -> None:
    begun = split(vocabulary, "ab</th")
    constraint = slot(vocabulary, *begun, budget=len(begun), end=f"\n{END}\n", jump_forward=True)
    forced = constraint.take_forced(32)
    assert vocabulary.decode_str(forced) == "ink>\n"
    assert constraint.is_over


def test_jumps_and_masks_write_the_same_end(vocabulary: LLTokenizer) -> None:
    thoughts = split(vocabulary, "ab")
    jumping = slot(vocabulary, *thoughts, regex="[XY]YXY", budget=2, jump_forward=True)
    stepping = slot(vocabulary, *thoughts, regex="[XY]YXY", budget=2)
    first, rest = jumping.take_forced(2), jumping.take_forced(32)
    assert len(first) == 2 and stepping.take_forced(32) == []
    states = feed(stepping, first + rest)
    assert states[:-1] == [{token} for token in first + rest]
    x, y = split(vocabulary, "XY")
    assert allowed(jumping) == states[-1] == {x, y}
    assert jumping.advance(x) == ""
    assert vocabulary.decode_str(jumping.take_forced(32)) == "YXY"[:3]


def test_what_ends_the_text_is_barred_in_a_reasoning_before_a_grammar(
    vocabulary: LLTokenizer,
) -> None:
    constraint = slot(vocabulary, regex="[XY]")
    states = feed(constraint, split(vocabulary, f"a{END}"))
    x, y = split(vocabulary, "XY")
    (overshooting,) = vocabulary.tokenize_str(">!")
    assert states[0] == EVERY - {STOP}
    assert states[-2] == EVERY - {STOP, overshooting}, "the grammar begins right after the mark"
    assert states[-1] == {x, y}
    assert constraint.advance(STOP) != ""
    assert slot(vocabulary, regex="[XY]").advance(STOP) != ""
    assert slot(vocabulary, budget=3).advance(STOP) == "", "without a grammar the text may end"


def test_a_text_that_may_reason_begins_with_the_mark_or_obeys_the_grammar(
    vocabulary: LLTokenizer,
) -> None:
    start, (x, y) = vocabulary.tokenize_str(START), split(vocabulary, "XY")
    (less,) = split(vocabulary, "<")
    assert start[0] == less
    assert feed(slot(vocabulary, regex="XY?", start=START), [x]) == [{less, x}, {STOP, y}]
    reasoning = slot(vocabulary, regex="XY?", start=START)
    states = feed(reasoning, start + split(vocabulary, f"a{END}"))
    assert states[: len(start)] == [{less, x}] + [{token} for token in start[1:]]
    assert states[-1] == {x}


def test_a_grammar_that_allows_a_part_of_the_mark_goes_on_with_it(vocabulary: LLTokenizer) -> None:
    start, (x, less) = vocabulary.tokenize_str(START), split(vocabulary, "X<")
    follows_grammar = slot(vocabulary, regex="<X", start=START)
    assert feed(follows_grammar, [less, x]) == [{less}, {start[1], x}, {STOP}]
    reasons = slot(vocabulary, regex="<X", start=START)
    assert feed(reasons, start + split(vocabulary, END))[-1] == {less}


def test_without_a_grammar_only_the_beginning_of_an_answer_may_reason(
    vocabulary: LLTokenizer,
) -> None:
    answer = slot(vocabulary, start=START, budget=1)
    feed(answer, split(vocabulary, "a"))
    assert answer.is_over
    reasoning = slot(vocabulary, start=START, budget=1)
    feed(reasoning, split(vocabulary, f"\n {START}a"))
    assert allowed(reasoning) == {vocabulary.tokenize_str(END)[0]}


def test_a_token_that_is_barred_fails_the_request(vocabulary: LLTokenizer) -> None:
    constraint = slot(vocabulary, budget=0)
    assert "no token is left" in constraint.advance(split(vocabulary, "a")[0])


def test_an_end_that_the_tokens_cannot_write_is_an_error(vocabulary: LLTokenizer) -> None:
    form = GrammarForm.of("", ThinkingForm(END, is_inside=False))
    with pytest.raises(ValueError, match="begins"):
        compile_form(vocabulary, form)


@pytest.mark.parametrize("seed", range(20))
def test_a_state_is_a_function_of_the_tokens_before(vocabulary: LLTokenizer, seed: int) -> None:
    """A request that was retracted, or resent, goes on as the one that was not."""
    random = Random(seed)
    regex, start = random.choice(["", "[XY]{2,9}Z"]), random.choice(["", START])
    budget = random.choice([None, 0, 2, 9])

    def state(*known: int) -> SlotConstraint:
        return slot(vocabulary, *known, regex=regex, start=start, budget=budget)

    stayed, known = state(), list[int]()
    likely = split(vocabulary, "<>/thinkXYZ")
    for _ in range(40):
        choices = allowed(stayed)
        assert choices == allowed(state(*known))
        assert stayed.is_over == state(*known).is_over
        token = random.choice(sorted(choices & set(likely)) or sorted(choices))
        if token == STOP:
            break
        assert stayed.advance(token) == ""
        known.append(token)


def test_every_rule_has_a_key_of_its_own() -> None:
    forms = [
        GrammarForm.of("a"),
        *(
            GrammarForm.of(text, ThinkingForm(END, start, inside, budget))
            for text in ("", "a")
            for start in ("", START)
            for inside in (False, True)
            for budget in (None, 0, 1)
        ),
    ]
    keys = sorted(form.key for form in forms)
    assert all(one != other for one, other in pairwise(keys))


@pytest.mark.parametrize("regex", ["", "(Rome|Oslo), [0-9] quick brown foxes"])
def test_every_engine_gives_the_same_tokens_with_jumps_and_without(
    llama_dir: Path, regex: str
) -> None:
    vocabulary = tiny_vocabulary(llama_dir, 512)
    grammar = to_library_form(Grammar("regex", regex), vocabulary) if regex else ""
    form = GrammarForm.of(grammar, ThinkingForm(END, budget=6))
    answers = []
    for kernels in ("torch", "auto"):
        for jumps in (True, False):
            runner = runner_of(llama_dir, attention_backend=kernels)
            runner.table.sampling.compiled = {form.key: compile_form(vocabulary, form)}
            tokens, num_steps = generate(runner, form, jumps)
            assert (num_steps < len(tokens)) == jumps
            answers.append(tokens[:25])
    closing = vocabulary.tokenize_str(END)
    assert answers[0][6 : 6 + len(closing)] == closing
    assert answers == [answers[0]] * 4


def generate(runner: Runner, form: GrammarForm, jumps: bool) -> tuple[list[int], int]:
    """Return at least 25 tokens of a drawn answer, and the number of steps that it took."""
    prompt = prompts_of([5])[0]
    rules = SlotSamplingParams(
        num_prompt=len(prompt), stop_ids=pack_ids([STOP]), grammar=form.key, jumps=jumps
    )
    pages = pack_ids(range(20))
    new = [NewSlot(0, pack_ids(prompt), 0, pages, 1.0, -1, 1.0, 3, rules)]
    plan = StepPlan(0, EXTEND, pack_ids([0]), pack_ids([len(prompt)]), new, pack_ids([]))
    tokens: list[int] = []
    num_steps = 0
    while len(tokens) < 25:
        result = runner.run(plan)
        assert result.failed == []
        tokens += unpack_ids(result.token_ids)
        for row in result.forced:
            tokens += unpack_ids(row.token_ids)
        num_steps += 1
        plan = StepPlan(num_steps, DECODE, pack_ids([0]), pack_ids([1]), [], pack_ids([]))
    return tokens, num_steps
