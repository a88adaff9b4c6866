"""Choices and logprobs on their way through the scheduler."""

from array import array
from typing import Any

import pytest

from quadriga.sampling.params import SamplingParams
from quadriga.wire.logprobs import LogprobBlock, PromptPiece, SampledLogprobs
from quadriga.wire.packing import pack_floats, pack_ids, unpack_ids
from quadriga.wire.to_detok import StepOutput, StreamStart
from quadriga.wire.to_scheduler import CLIENT_LOST, AbortRequest, Submit
from quadriga.wire.worker import WantedLogprobs
from scheduler_proc.journal.events import StepEvents, stream_start
from scheduler_proc.state.request import FinishReason, Request
from tests.unit.scheduler.sampling_bench import PROMPT, Bench
from tests.unit.simulation import abort


def block(*values: float) -> LogprobBlock:
    return LogprobBlock(pack_floats(values), 0, b"", b"")


def test_choices_share_a_prompt_and_have_seeds_of_their_own() -> None:
    bench = Bench()
    bench.submit(n=3, logprobs=1, prompt_logprobs=0)
    plan = bench.plan()
    assert [new.seed for new in plan.new] == [7, 8, 9]
    assert [new.computed for new in plan.new] == [0, 16, 16]
    assert unpack_ids(plan.num_tokens).tolist() == [20, 4, 4]
    widths = [new.rules and (new.rules.prompt_logprobs, new.rules.logprobs) for new in plan.new]
    assert widths == [(0, 1), (None, 1), (None, 1)]
    assert {new.rules and new.rules.num_prompt for new in plan.new} == {20}


def test_each_choice_ends_once_and_an_abort_ends_all() -> None:
    bench = Bench()
    bench.submit(n=3)
    bench.scheduler.step([abort("r")], [])
    closed = [close for output in bench.detok.sent for close in output.closed]
    assert [(close.request_id, close.index) for close in closed] == [("r", 0), ("r", 1), ("r", 2)]


def test_a_lost_client_that_comes_back_gets_all_choices_also_where_one_had_ended() -> None:
    bench = Bench()
    bench.submit(n=2)
    bench.answer(bench.plan(), [50, 51])
    first, second = bench.scheduler.lifecycle.table.of_client(b"c", "r")
    bench.scheduler.lifecycle.finish(first, FinishReason.STOP)
    bench.scheduler.step([AbortRequest(b"c", "", CLIENT_LOST)], [])
    bench.worker.sent.clear()
    bench.detok.sent.clear()
    bench.submit(n=2, client_retry=True)
    outputs = [message for message in bench.detok.sent if isinstance(message, StepOutput)]
    replays = [replay for output in outputs for replay in output.replayed]
    assert [(it.opening.index, unpack_ids(it.token_ids).tolist()) for it in replays] == [
        (0, [50]),
        (1, []),
    ]
    assert [it.closing is not None for it in replays] == [True, False]
    (choice,) = bench.scheduler.lifecycle.table.of_client(b"c", "r")
    assert (choice.index, choice.sampling.seed) == (1, second.sampling.seed)
    bench.detok.sent.clear()
    bench.submit(n=2, client_retry=True)  # both are known now
    assert len(bench.scheduler.lifecycle.table) == 1
    assert [len(output.replayed) for output in bench.detok.sent] == [2]


@pytest.mark.parametrize(("n", "refused"), [(4, False), (5, True)])
def test_choices_are_queued_all_or_none(n: int, refused: bool) -> None:
    bench = Bench(max_queued_requests=4)
    bench.submit(n=n)
    errors = [close.error.code for output in bench.detok.sent for close in output.closed]
    assert errors == (["queue_full"] * n if refused else [])


def test_a_request_that_asks_for_nothing_carries_no_slot_params() -> None:
    bench = Bench()
    bench.submit(temperature=0.0, top_k=5, top_p=0.5)
    assert bench.plan().new[0].rules is None


def test_logprobs_reach_the_detokenizer_with_the_positions_of_their_tokens() -> None:
    bench = Bench(chunked_prefill_size=12)
    bench.submit(logprobs=0, prompt_logprobs=0)
    first = bench.plan()
    pieces = [PromptPiece(0, block(*range(12)))]
    assert bench.answer(first, [-1], prompt_logprobs=pieces) == []
    second = bench.plan()
    sampled = SampledLogprobs(pack_ids([0]), block(-0.5))
    pieces = [PromptPiece(0, block(*range(12, 19)))]
    (output,) = bench.answer(second, [50], logprobs=sampled, prompt_logprobs=pieces)
    (opened,) = output.opened
    assert isinstance(opened, StreamStart) and opened.prompt is not None
    assert unpack_ids(opened.prompt.token_ids) == array("i", PROMPT)
    assert [len(block.values) // 4 for block in opened.prompt.blocks] == [12, 7]
    assert output.logprobs == sampled


def test_a_token_of_a_request_that_has_ended_has_no_place() -> None:
    bench = Bench()
    bench.submit(n=2, logprobs=0)
    plan = bench.plan()
    requests = bench.scheduler.lifecycle.table.of_client(b"c", "r")
    bench.scheduler.lifecycle.finish(requests[0], FinishReason.STOP)
    sampled = SampledLogprobs(pack_ids([0, 1]), block(-0.5, -0.25))
    outputs = bench.answer(plan, [50, 51], logprobs=sampled)
    with_tokens = next(output for output in outputs if output.seqs)
    assert with_tokens.logprobs is not None
    assert unpack_ids(with_tokens.logprobs.rows).tolist() == [-1, 0]


def request_of(seq: int, **fields: Any) -> Request:
    params = SamplingParams(**{"max_new_tokens": 2, "seed": 7, **fields})
    message = Submit(b"c", str(seq), pack_ids(PROMPT), params, True, 1.0, 1.0)
    return Request.from_submit(seq, message, frozenset())


def test_chosen_ids_follow_the_likeliest_and_cost_other_requests_nothing() -> None:
    chosen = list(range(30))
    chooser = request_of(0, logprobs=1, logprob_token_ids=chosen)
    other = request_of(1, logprobs=2)
    assert chooser.slot_params is not None
    assert chooser.slot_params.logprobs == WantedLogprobs(1, pack_ids(chosen))
    assert stream_start(chooser).logprobs == 31
    ids, values = [9, *chosen], [-float(number) for number in range(31)]
    wide = LogprobBlock(pack_floats([-0.5] * 2), 31, pack_ids(ids * 2), pack_floats(values * 2))
    events = StepEvents(seqs=[0, 1], token_ids=[50, 51])
    events.add_logprobs(SampledLogprobs(pack_ids([0, 1]), wide), [chooser, other])
    assert chooser.logprobs == [
        LogprobBlock(pack_floats([-0.5]), 31, pack_ids(ids), pack_floats(values))
    ]
    assert other.logprobs == [
        LogprobBlock(pack_floats([-0.5]), 2, pack_ids(ids[:2]), pack_floats(values[:2]))
    ]
