"""Steps with drafts of tokens by a drafter that knows the answers, and steps without drafts."""

from collections.abc import Callable

import numpy as np

from quadriga.wire.packing import pack_ids, unpack_ids
from quadriga.wire.worker import DECODE, EXTEND, NewSlot, SlotSamplingParams, StepPlan, StepResult
from worker_proc.speculation.ngram import NgramDrafter
from worker_proc.step.runner import Runner

NUM_TOKENS = 40
PAGES_OF_SLOT = 20  # of 4 tokens
Answer = tuple[list[int], bytes]


class FixedDrafter(NgramDrafter):
    """Drafts a known answer, in which some tokens are wrong."""

    def __init__(self, runner: Runner, answers: dict[int, list[int]], wrong_every: int) -> None:
        super().__init__(runner.table)
        self.answers = answers
        self.wrong_every = wrong_every

    def _draft_slot(self, slot: int, most: int) -> list[int]:
        table = self._table
        known = int(table.num_known[slot])
        token_ids = [
            abs(token - (place % self.wrong_every == 0))
            for place, token in enumerate(self.answers[slot])
        ][known : known + most]
        return table.sampling.follow_drafts(slot, token_ids)


def rows_of(
    prompts: list[list[int]], rules: Callable[[int], SlotSamplingParams | None], temperature: float
) -> list[NewSlot]:
    return [
        NewSlot(
            slot,
            pack_ids(prompt),
            0,
            pack_ids(range(slot * PAGES_OF_SLOT, (slot + 1) * PAGES_OF_SLOT)),
            temperature,
            -1,
            0.9,
            slot,
            rules(len(prompt)),
        )
        for slot, prompt in enumerate(prompts)
    ]


def generate(
    runner: Runner, new: list[NewSlot], num_drafts: int, num_tokens: int = NUM_TOKENS
) -> tuple[list[Answer], int]:
    """Return tokens and logprobs of every slot, and the number of steps."""
    runner.table.release_all()
    slots = [one.slot for one in new]
    tokens: dict[int, list[int]] = {slot: [] for slot in slots}
    logprobs: dict[int, bytes] = dict.fromkeys(slots, b"")
    counts = [len(one.token_ids) // 4 for one in new]
    plan = StepPlan(0, EXTEND, pack_ids(slots), pack_ids(counts), new, b"")
    num_steps = 0
    while plan.slots:
        take_in(runner.run(plan), list(unpack_ids(plan.slots)), tokens, logprobs)
        num_steps += 1
        going_on = [slot for slot in slots if len(tokens[slot]) < num_tokens]
        ones = pack_ids([1] * len(going_on))
        drafts = pack_ids([num_drafts] * len(going_on)) if num_drafts else b""
        plan = StepPlan(num_steps, DECODE, pack_ids(going_on), ones, [], b"", num_guesses=drafts)
    return [
        (tokens[slot][:num_tokens], logprobs[slot][: 4 * num_tokens]) for slot in slots
    ], num_steps


def take_in(
    result: StepResult, slots: list[int], tokens: dict[int, list[int]], logprobs: dict[int, bytes]
) -> None:
    assert result.failed == []
    for slot, token in zip(slots, unpack_ids(result.token_ids), strict=True):
        tokens[slot].append(token)
    for drafted in result.guessed:
        assert len(drafted.token_ids) // 4 <= drafted.num_guesses
        tokens[slots[drafted.row]] += unpack_ids(drafted.token_ids)
    for forced in result.forced:
        tokens[slots[forced.row]] += unpack_ids(forced.token_ids)
    if result.logprobs is not None:
        values = np.frombuffer(result.logprobs.block.values, dtype="<i4").reshape(-1, 1)
        for row, value in zip(unpack_ids(result.logprobs.rows), values, strict=True):
            logprobs[slots[row]] += value.tobytes()


def no_rules(num_prompt: int) -> None:
    return None


def penalties(num_prompt: int) -> SlotSamplingParams:
    return SlotSamplingParams(
        num_prompt, repetition_penalty=1.3, frequency_penalty=0.5, bad_words=[pack_ids([5, 6])]
    )


def with_logprobs(num_prompt: int) -> SlotSamplingParams:
    return SlotSamplingParams(num_prompt, logprobs=2)
