"""The hash of a log changes with each kind of decision, and with nothing else."""

from collections.abc import Callable, Iterator
from typing import Any, get_args

import msgspec
import pytest

from quadriga.sampling.pooling import Pooling
from quadriga.wire.adapter import AdapterRef
from quadriga.wire.client import ErrorInfo, Info, ProgressAnswer, RequestProgress, RequestState
from quadriga.wire.grammar import GrammarForm
from quadriga.wire.logprobs import LogprobBlock, SampledLogprobs
from quadriga.wire.packing import pack_floats, pack_ids
from quadriga.wire.to_detok import (
    DetokMessage,
    Drained,
    ForgetStreams,
    HandedBack,
    InfoReply,
    KnownRequest,
    KnownRequests,
    LiveFrame,
    ProgressReply,
    PromptLogprobsData,
    ReplicaNews,
    SchedulerRestarted,
    StepOutput,
    StopDetok,
    StreamEnd,
    StreamReplay,
    StreamStart,
    Withdrawn,
)
from quadriga.wire.trace import RequestTrace, TraceContext
from quadriga.wire.worker import (
    EXTEND,
    MIXED,
    CompileGrammar,
    EvictAdapter,
    ForgetAdapter,
    ForgetGrammar,
    LoadAdapter,
    LoadPages,
    NewSlot,
    ResetWorker,
    SlotSamplingParams,
    StepPlan,
    StopWorker,
    StorePages,
    WantedLogprobs,
    WorkerMessage,
)
from tests.unit.decision_log import INFO_FIGURES, DecisionLog

replace = msgspec.structs.replace

# In these messages no field is empty.
WANTED = WantedLogprobs(2, pack_ids([40, 41]))
RULES = SlotSamplingParams(
    2, 0.1, 1.1, 0.2, 0.3, pack_ids([50, 51]), pack_floats([1.5, 2.5]), pack_ids([60, 61]),
    [pack_ids([70, 71]), pack_ids([72])], 4, pack_ids([80, 81]), WANTED, 3, b"a key", True,
)  # fmt: skip
POOLING = Pooling(
    "mean",
    normalize=False,
    dimensions=8,
    max_tokens=9,
    token_ids=[4, 5],
    num_last=2,
    whole=True,
    activation="sigmoid",
    text_pair="b",
    max_first_tokens=3,
    max_second_tokens=4,
    instruction="i",
    num_first=2,
    prompt_name="p",
)
NEW = NewSlot(1, pack_ids([5, 6]), 1, pack_ids([9, 10]), 0.5, 20, 0.9, 7, RULES, POOLING, 3)
OTHER_NEW = replace(NEW, slot=2, rules=replace(RULES, logprobs=5))
PLAN = StepPlan(
    3, MIXED, pack_ids([1, 2]), pack_ids([1, 3]), [NEW, OTHER_NEW], pack_ids([4, 5]),
    pack_ids([0, 8, 3, 7]), 77, pack_ids([0, 2]), [b"group", b"other"],
)  # fmt: skip
BLOCK = LogprobBlock(pack_floats([-1, -2]), 1, pack_ids([90, 91]), pack_floats([-3, -4]))
TRACE = RequestTrace(TraceContext("0" * 32, "1" * 16), "llm_request", "a", 0, [], {})
START = StreamStart(
    1, b"c", "a", True, True, ["stop", "halt"], 1, ["re", "gex"], True, 2, 3,
    PromptLogprobsData(pack_ids([5, 6]), 1, [BLOCK]), True, pack_ids([6, 7]), 8,
    pack_ids([3, 2]),
)  # fmt: skip
ERROR = ErrorInfo("a_code", "a message", "field", 1.5)
END = StreamEnd(1, b"c", "a", "stop", 2, ERROR, 5, 3, 1.0, 1.1, 1.2, 1.3, 1, TRACE, 9, b"vector")
OUTPUT = StepOutput(
    1.5, [START, replace(START, seq=2)], [1, 2], pack_ids([8, 9]), [END, replace(END, seq=2)],
    SampledLogprobs(pack_ids([0, 1]), BLOCK), 4, 77,
    [StreamReplay(START, pack_ids([3, 4]), [BLOCK], END)], 0.5, ReplicaNews(num_available=5),
)  # fmt: skip
PROGRESS = RequestProgress(RequestState.QUEUED, 1, 2.0, 3, 4)
MESSAGES: list[msgspec.Struct] = [
    PLAN,
    CompileGrammar(GrammarForm(b"a key", "a text")),
    ForgetGrammar(b"a key"),
    LoadAdapter(AdapterRef("an id", "a name", "a path"), 2),
    ForgetAdapter(2),
    EvictAdapter("an id"),
    StorePages(pack_ids([1, 2]), b"some hashes"),
    LoadPages(6, pack_ids([1, 2]), b"some hashes"),
    ResetWorker(),
    StopWorker(),
    OUTPUT,
    InfoReply(b"c", Info("id", dict.fromkeys(INFO_FIGURES, 5.0))),
    ProgressReply(b"c", ProgressAnswer("id", [PROGRESS, replace(PROGRESS, place=2)])),
    LiveFrame(b"a frame"),
    SchedulerRestarted(),
    Drained(),
    StopDetok(),
    HandedBack(5, [1, 2]),
    Withdrawn([1, 2]),
    ForgetStreams([1, 2]),
    KnownRequests([KnownRequest(b"c", "a", AdapterRef("an id", "a name", "a path"))]),
]
NO_DECISIONS = {
    "StepPlan.session", "StorePages.session", "LoadPages.session",  # of a link
    "LoadAdapter.session", "ForgetAdapter.session", "EvictAdapter.session",
    "StepOutput.session",
    "StreamStart.placement", "StreamEnd.placement", "EndedRequest.placements",  # of the frontend
    "LoadPages.load", "HandedBack.number",  # names of messages
    "StepOutput.news",  # follows from the rest
    "StreamEnd.trace",  # test_tracer.py
    "LiveFrame.frame",  # test_feed.py
}  # fmt: skip
"""Fields that may change without another hash."""

Change = Callable[[Any], Any]
PLANS: dict[str, Change] = {
    "another slot": lambda plan: replace(plan, slots=pack_ids([1, 0])),
    "the rows in another order": lambda plan: replace(
        plan, slots=pack_ids([2, 1]), num_tokens=pack_ids([3, 1]), num_guesses=pack_ids([2, 0])
    ),
    "one row less": lambda plan: replace(
        plan, slots=pack_ids([1]), num_tokens=pack_ids([1]), num_guesses=pack_ids([0])
    ),
    "another number of tokens": lambda plan: replace(plan, num_tokens=pack_ids([1, 4])),
    "other guesses": lambda plan: replace(plan, num_guesses=b""),
    "another mode": lambda plan: replace(plan, forward_mode=EXTEND),
    "other pages": lambda plan: replace(
        plan, new=[replace(NEW, pages=pack_ids([9, 11])), OTHER_NEW]
    ),
    "another part that is cached": lambda plan: replace(
        plan, new=[replace(NEW, computed=0), OTHER_NEW]
    ),
    "requests in the slots of each other": lambda plan: replace(
        plan, new=[replace(OTHER_NEW, slot=1), replace(NEW, slot=2)]
    ),
    "a request is not admitted": lambda plan: replace(plan, new=[NEW], groups=[b"group"]),
    "another page in a table": lambda plan: replace(plan, grown=pack_ids([0, 8, 3, 6])),
    "pages in the tables of each other": lambda plan: replace(plan, grown=pack_ids([0, 7, 3, 8])),
    "a slot that is kept": lambda plan: replace(plan, released=pack_ids([4])),
}
OUTPUTS: dict[str, Change] = {
    "another token": lambda output: replace(output, token_ids=pack_ids([8, 10])),
    "tokens of each other": lambda output: replace(output, seqs=[2, 1]),
    "tokens in another order": lambda output: replace(
        output, seqs=[2, 1], token_ids=pack_ids([9, 8])
    ),
    "a later end of the step": lambda output: replace(output, time=1.6),
    "another end": lambda output: replace(output, closed=[END, replace(END, finish_reason="x")]),
    "one end less": lambda output: replace(output, closed=[END]),
    "ends in another order": lambda output: replace(output, closed=output.closed[::-1]),
    "no error": lambda output: replace(output, closed=[replace(END, error=None)]),
    "another first token": lambda output: replace(output, opened=[START]),
    "no replay": lambda output: replace(output, replayed=[]),
    "a longer queue": lambda output: replace(output, waiting=5),
}


def hash_of(*messages: msgspec.Struct, at_us: int = 10) -> str:
    log = DecisionLog()
    for message in messages:
        log.observe(message, at_us)
    return str(log.summary["sha256"])


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_with_another_decision_has_another_hash(name: str) -> None:
    assert hash_of(PLANS[name](PLAN)) != hash_of(PLAN)


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_with_another_decision_has_another_hash(name: str) -> None:
    assert hash_of(OUTPUTS[name](OUTPUT)) != hash_of(OUTPUT)


@pytest.mark.parametrize("message", [PLAN, OUTPUT], ids=["plan", "output"])
def test_a_message_at_another_time_is_another_decision(message: msgspec.Struct) -> None:
    assert hash_of(message, at_us=10) != hash_of(message, at_us=11)


def test_messages_on_a_link_in_another_order_or_left_out_are_another_decision() -> None:
    later = replace(PLAN, step=4)
    assert len({hash_of(PLAN, later), hash_of(later, PLAN), hash_of(PLAN), hash_of()}) == 4


def test_which_of_two_links_is_first_is_no_decision() -> None:
    assert hash_of(PLAN, OUTPUT) == hash_of(OUTPUT, PLAN)


def test_a_line_is_a_fact_in_words_of_its_own() -> None:
    lines: list[str] = []
    log = DecisionLog(lines.append)
    log.observe(
        replace(PLAN, new=[replace(NEW, rules=None, pooling=None, adapter=-1)], groups=[]), 20
    )
    log.observe(StepOutput(1.5, [], [3], pack_ids([8]), []), 30)
    assert lines == [
        'worker 20 ["step", 3, 2]',
        'worker 20 ["release", 4]',
        'worker 20 ["release", 5]',
        'worker 20 ["fill", 1, [5, 6], 1, [9, 10], [0.5, 20, 0.9, 7], null, ""]',
        'worker 20 ["page", 0, 8]',
        'worker 20 ["page", 3, 7]',
        'worker 20 ["row", 1, 1, 0]',
        'worker 20 ["row", 2, 3, 2]',
        'detok 30 ["output", 1.5, 0, null]',
        'detok 30 ["token", 3, 8, null]',
    ]
    assert (log.summary["plans"], log.summary["facts"]) == (1, 10)


# --- every field ----------------------------------------------------------------------------------


def changes(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each change of one part of a message: the field that it is in, and the whole."""
    match value:
        case msgspec.Struct():
            for field, name, part in parts(value):
                is_opaque = name in NO_DECISIONS and isinstance(part, msgspec.Struct)
                for inner, changed in [(name, None)] if is_opaque else changes(part, name):
                    yield inner, replace(value, **{field: changed})
        case list():
            for place, element in enumerate(value):
                for inner, changed in changes(element, path):
                    yield inner, [*value[:place], changed, *value[place + 1 :]]
            if len(value) > 1:
                yield path, value[::-1]
        case dict():
            for key, element in value.items():
                for inner, changed in changes(element, path):
                    yield inner, {**value, key: changed}
        case bytes():
            for place in range(len(value)):
                yield path, bytes([*value[:place], value[place] ^ 1, *value[place + 1 :]])
        case RequestState():
            yield path, RequestState.DECODING
        case str():
            yield path, value + "x"
        case bool():
            yield path, not value
        case int() | float():
            yield path, value + 1


def fields_of(value: Any) -> Iterator[str]:
    """Yield the name of each field of a message, or of the messages in that field."""
    match value:
        case msgspec.Struct():
            for _, name, part in parts(value):
                inner = [] if name in NO_DECISIONS else list(fields_of(part))
                yield from inner or [name]
        case list():
            for element in value:
                yield from fields_of(element)


def parts(message: msgspec.Struct) -> Iterator[tuple[str, str, Any]]:
    """Yield each field, its name with that of the message, and its value."""
    for field in msgspec.structs.fields(message):
        yield field.name, f"{type(message).__name__}.{field.name}", getattr(message, field.name)


def test_every_message_is_known() -> None:
    assert {type(one) for one in MESSAGES} == {*get_args(WorkerMessage), *get_args(DetokMessage)}


@pytest.mark.parametrize("message", MESSAGES, ids=lambda one: type(one).__name__)
def test_every_field_is_a_decision_or_is_known_to_be_none(message: msgspec.Struct) -> None:
    changed = list(changes(message))
    names = {name for name, _ in changed}
    assert names >= set(fields_of(message)), "a field is empty"
    known = hash_of(message)
    assert {name for name, one in changed if hash_of(one) == known} == NO_DECISIONS & names


def test_other_gauges_of_an_info_are_no_decisions() -> None:
    reply = InfoReply(b"c", Info("id", {"running": 5}))
    assert hash_of(reply) == hash_of(InfoReply(b"c", Info("id", {"running": 5, "device": "cpu"})))
