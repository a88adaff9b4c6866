"""The output of a step: sampled tokens, and a handle to wait for them while the device computes."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from quadriga.errors import NonFiniteLogits
from quadriga.wire.messages.arrays import pack_ids
from quadriga.wire.messages.logprobs import PromptPiece, SampledLogprobs
from quadriga.wire.messages.worker import FailedRow, ForcedRow, GuessedRow, NonFiniteRow
from worker_proc.attention.base import Ints
from worker_proc.sampling.grammar_mask import Constrained, advance
from worker_proc.step.inputs import StepInputs
from worker_proc.step.logprobs import first_nan
from worker_proc.step.slot_table import ALL_FINITE
from worker_proc.system.transfer import TokenIds

MAX_FORCED_TOKENS = 32  # for one row and step, so that one row cannot make a step long for others
NO_TOKENS = np.empty(0, dtype=np.int64)


class SampledTokens(NamedTuple):
    """The tokens of the rows that sample.

    Attributes:
        token_ids: `[samples]`; -1 where the logits have NaN or infinity, or no finite number.
        logprobs: Waits for the logprobs of the rows that asked for them.
        constrained: Rows with a grammar, which has not accepted its token yet.
        stored: True if the engine has written the tokens to the slot table.
    """

    token_ids: TokenIds
    logprobs: Callable[[], SampledLogprobs] | None = None
    constrained: Sequence[Constrained] = ()
    stored: bool = False


class EngineOutput(msgspec.Struct):
    """The fields of a StepResult that the engine fills in."""

    token_ids: bytes
    logprobs: SampledLogprobs | None = None
    prompt_logprobs: list[PromptPiece] = []
    failed: list[FailedRow] = []
    forced: list[ForcedRow] = []
    guessed: list[GuessedRow] = []
    nonfinite: list[NonFiniteRow] = []


class PendingStep(msgspec.Struct, frozen=True):
    """A step that was launched.

    Attributes:
        wait: Wait for the end of the step, in any thread, and return its output.
        blocks_next: True if `wait` must return before the next step is launched, since grammars
            have to accept their tokens before they mask the next ones, and the next step begins
            after the last right guess.
    """

    wait: Callable[[], EngineOutput]
    blocks_next: bool = False


def pending_step(
    inputs: StepInputs,
    sampled: SampledTokens,
    prompt_logprobs: Sequence[Callable[[], PromptPiece]],
    jump_forward: bool,
    guessed: Sequence[GuessedRow] = (),
) -> PendingStep:
    """Start to copy the sampled tokens to the host.

    Args:
        inputs: The step.
        sampled: The tokens of its sampling rows.
        prompt_logprobs: Wait for the logprobs of its prompt tokens.
        jump_forward: Append the tokens that grammars force to the slots.
        guessed: Its rows with guesses, which may have several tokens.
    """
    table = inputs.table
    fetch = table.copier.begin_all(sampled.token_ids, table.nonfinite_from)
    num_computed = table.num_computed[inputs.layout.slots]

    def wait() -> EngineOutput:
        token_ids = np.empty(len(inputs.layout.slots), dtype="<i4")
        token_ids.fill(-1)
        (on_host, nonfinite_from), rows = fetch(), inputs.sampled_rows
        if guessed:  # the first token of each row; `guessed` has those after it
            is_first = np.diff(inputs.samples, prepend=-1) != 0
            token_ids[rows[is_first]] = on_host[is_first]
        else:
            token_ids[rows] = on_host
        output = EngineOutput(
            token_ids.tobytes(),
            sampled.logprobs and sampled.logprobs(),
            [piece() for piece in prompt_logprobs],
            guessed=list(guessed),
        )
        if constrained := [one for one in sampled.constrained if on_host[one.row] >= 0]:
            output.failed = advance(constrained, on_host, inputs.sampled_rows)
            if jump_forward:
                output.forced = _append_forced(constrained, inputs)
        broken = {
            int(rows[sample]): int(inputs.sample_positions[sample])
            for sample in np.flatnonzero(on_host < 0)
        }
        for piece in output.prompt_logprobs:
            if (place := first_nan(piece.block)) is not None:
                begin = inputs.layout.num_computed[inputs.plan_rows == piece.row]
                broken[piece.row] = int(begin[0]) + 1 + place
        first = nonfinite_from[inputs.layout.slots]
        if broken or (first < num_computed).any():
            add_nonfinite(output, broken, inputs.plan_rows, first, inputs.layout.num_computed)
        return output

    return PendingStep(wait, blocks_next=bool(sampled.constrained))


def add_nonfinite(
    output: EngineOutput, broken: Mapping[int, int], plan_rows: Ints, first: Ints, begins: Ints
) -> None:
    """Add to the output of a step which requests end, and which pages must not be shared.

    Args:
        output: Of the step.
        broken: The position of the token that could not be sampled, by row of the plan.
        plan_rows: `[rows]` the row's number in the plan.
        first: `[rows]` the first position whose keys or values are not finite, or a higher one than
            the row has computed.
        begins: `[rows]` the first position that the step has computed.
    """
    for row, position in broken.items():
        error = NonFiniteLogits.at(position)
        output.failed.append(FailedRow(row, str(error), error.code))
    for row, lowest, begin in zip(plan_rows.tolist(), first.tolist(), begins.tolist(), strict=True):
        if row in broken:
            lowest = min(lowest, begin)
        if lowest < ALL_FINITE:
            output.nonfinite.append(NonFiniteRow(row, lowest))


def _append_forced(constrained: Sequence[Constrained], inputs: StepInputs) -> list[ForcedRow]:
    """Append to each slot the tokens that its grammar forces after the sampled one.

    The next step of the slot computes them together with the sampled token.
    """
    table, forced = inputs.table, []
    last_of_slots = {int(inputs.sampled_slots[row]): row for row, _ in constrained}
    for row, grammar in constrained:
        slot = int(inputs.sampled_slots[row])
        if row != last_of_slots[slot]:
            continue  # a token of the row follows
        room = table.context_length - int(table.num_known[slot])
        token_ids = grammar.take_forced(min(room, MAX_FORCED_TOKENS))
        if token_ids:
            table.append_forced(slot, token_ids)
            forced.append(ForcedRow(int(inputs.sampled_rows[row]), pack_ids(token_ids)))
    return forced
