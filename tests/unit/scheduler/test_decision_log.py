"""The hash of a log changes with each kind of decision, and with nothing else."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from quadriga.wire.client import ErrorInfo
from quadriga.wire.packing import pack_ids
from quadriga.wire.to_detok import StepOutput, StreamEnd, StreamStart
from quadriga.wire.worker import EXTEND, MIXED, NewSlot, StepPlan
from tests.unit.decision_log import DecisionLog

replace = msgspec.structs.replace

NEW = NewSlot(1, pack_ids([5, 6]), 0, pack_ids([9]), 0.0, -1, 1.0, 7)
PLAN = StepPlan(
    3, EXTEND, pack_ids([0, 1]), pack_ids([1, 2]), [NEW], pack_ids([4]), pack_ids([0, 8]), 77
)
START = StreamStart(1, b"c", "a", True, True, [])
END = StreamEnd(1, b"c", "a", "stop", None, None, 5, 0, 1.0, 1.0, 1.0, 1.0)
OUTPUT = StepOutput(1.5, [START], [1, 2], pack_ids([8, 9]), [END])

Change = Callable[[Any], Any]
PLANS: dict[str, Change] = {
    "another slot": lambda plan: replace(plan, slots=pack_ids([0, 2])),
    "the rows in another order": lambda plan: replace(
        plan, slots=pack_ids([1, 0]), num_tokens=pack_ids([2, 1])
    ),
    "another number of tokens": lambda plan: replace(plan, num_tokens=pack_ids([1, 3])),
    "another mode": lambda plan: replace(plan, forward_mode=MIXED),
    "another step": lambda plan: replace(plan, step=4),
    "other pages": lambda plan: replace(plan, new=[replace(NEW, pages=pack_ids([10]))]),
    "other tokens": lambda plan: replace(plan, new=[replace(NEW, token_ids=pack_ids([5, 7]))]),
    "a part that is cached": lambda plan: replace(plan, new=[replace(NEW, computed=1)]),
    "another seed": lambda plan: replace(plan, new=[replace(NEW, seed=8)]),
    "another page in a table": lambda plan: replace(plan, grown=pack_ids([0, 7])),
    "a slot that is kept": lambda plan: replace(plan, released=b""),
}
OUTPUTS: dict[str, Change] = {
    "another token": lambda output: replace(output, token_ids=pack_ids([8, 10])),
    "another request": lambda output: replace(output, seqs=[1, 3]),
    "a later end of the step": lambda output: replace(output, time=1.6),
    "another end": lambda output: replace(output, closed=[replace(END, finish_reason="length")]),
    "no end": lambda output: replace(output, closed=[]),
    "an error": lambda output: replace(output, closed=[replace(END, error=ErrorInfo("x", "y"))]),
    "a later admission": lambda output: replace(output, closed=[replace(END, admitted_at=2.0)]),
    "cached tokens": lambda output: replace(output, closed=[replace(END, cached_tokens=1)]),
    "another first token": lambda output: replace(output, opened=[replace(START, index=1)]),
    "a longer queue": lambda output: replace(output, waiting=1),
}


def hash_of(message: msgspec.Struct, at_us: int = 10) -> str:
    log = DecisionLog()
    log.observe(message, at_us)
    return str(log.summary["sha256"])


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_with_another_decision_has_another_hash(name: str) -> None:
    assert hash_of(PLANS[name](PLAN)) != hash_of(PLAN)


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_with_another_decision_has_another_hash(name: str) -> None:
    assert hash_of(OUTPUTS[name](OUTPUT)) != hash_of(OUTPUT)


def test_a_later_plan_is_another_decision() -> None:
    assert hash_of(PLAN, 10) != hash_of(PLAN, 11)


def test_the_session_of_a_link_is_no_decision() -> None:
    assert hash_of(replace(PLAN, session=78)) == hash_of(PLAN)
    assert hash_of(replace(OUTPUT, session=78)) == hash_of(OUTPUT)
