"""Keep what was sampled after right guesses.

A token is a function of seed, position and logits. So a guess is right if the token that was
sampled in its place equals it, and what was sampled after it is then what a step of its own would
have sampled: drawn, with penalties, or masked by a grammar, as well as greedy.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from quadriga.wire.messages.arrays import pack_ids
from quadriga.wire.messages.worker import GuessedRow
from worker_proc.sampling.grammar_mask import Constrained
from worker_proc.step.inputs import StepInputs
from worker_proc.step.logprobs import keep_samples
from worker_proc.step.outputs import SampledTokens

Flags = npt.NDArray[np.bool_]
NO_GUESS = -1  # in the place of a row's last sample


def verify_guesses(
    inputs: StepInputs, sampled: SampledTokens
) -> tuple[StepInputs, SampledTokens, list[GuessedRow]]:
    """Drop what was sampled after wrong guesses.

    Args:
        inputs: A step with guesses, which are forgotten.
        sampled: All of its samples, on the host. The tokens may have been written over the guesses.

    Returns:
        The step and its tokens as if it had no other samples, and its rows with guesses.
    """
    table, samples = inputs.table, inputs.samples
    token_ids = np.asarray(sampled.token_ids)
    starts = np.flatnonzero(np.diff(samples, prepend=-1))
    guesses = [
        token
        for slot in inputs.sampled_slots[starts].tolist()
        for token in (*table.guesses.get(slot, ()), NO_GUESS)
    ]
    counts = np.diff(starts, append=len(samples))
    num_wrong = np.cumsum(token_ids != np.array(guesses))
    num_wrong_before = np.concatenate(([0], num_wrong[:-1]))
    kept = num_wrong_before == np.repeat(num_wrong_before[starts], counts)
    is_first = np.diff(samples, prepend=-1) != 0
    kept &= is_first | (token_ids >= 0)  # the next step finds out about what could not be sampled
    num_kept = np.add.reduceat(kept, starts, dtype=np.int64)
    guessed = [
        GuessedRow(
            row=int(inputs.sampled_rows[start]),
            num_guesses=int(count) - 1,
            token_ids=pack_ids(token_ids[start + 1 : start + num].tolist()),
        )
        for start, count, num in zip(starts, counts, num_kept, strict=True)
        if count > 1
    ]
    table.forget_guesses()
    right = _only(inputs, kept)
    table.num_computed[right.sampled_slots] = right.sample_positions  # of several, the last counts
    return right, _only_tokens(inputs, sampled, kept), guessed


def _only(inputs: StepInputs, kept: Flags) -> StepInputs:
    return replace(
        inputs,
        samples=inputs.samples[kept],
        sampled_slots=inputs.sampled_slots[kept],
        sampled_rows=inputs.sampled_rows[kept],
        sample_positions=inputs.sample_positions[kept],
    )


def _only_tokens(inputs: StepInputs, sampled: SampledTokens, kept: Flags) -> SampledTokens:
    """Return the kept samples. A grammar's own state then has to accept each token of its slot."""
    table, numbers = inputs.table, np.cumsum(kept) - 1
    logprobs = sampled.logprobs and partial(
        keep_samples, sampled.logprobs(), inputs.sampled_rows, kept
    )
    constrained = [
        Constrained(int(numbers[row]), grammar)
        for row, _ in sampled.constrained
        if kept[row] and (grammar := table.sampling.grammar_of(int(inputs.sampled_slots[row])))
    ]
    token_ids = np.asarray(sampled.token_ids)[kept]
    return SampledTokens(token_ids, logprobs, constrained, sampled.stored)
