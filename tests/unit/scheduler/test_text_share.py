"""Texts that become vectors beside running streams: what they take, and that they always go on."""

import msgspec
import pytest

from quadriga.sampling.pooling import LOGPROBS, MEAN, Pooling
from quadriga.server.config.engine_args import SchedulerArgs
from quadriga.wire.to_scheduler import Submit
from scheduler_proc.planning.prefill import (
    MAX_STREAM_SLOWDOWN,
    MEAN_AIM,
    MIN_TEXT_SHARE,
    TextShare,
)
from scheduler_proc.planning.step_cost import StepCosts
from scheduler_proc.state.request import Request
from tests.unit.simulation import World, reference, submit, vector_of

STEP_S, ROW_S, TOKEN_S = 0.008, 0.0002, 0.0004
NUM_STREAMS, TEXT_TOKENS = 4, 64


class KnownCosts(StepCosts):
    def seconds(self, num_decodes: int, num_tokens: int = 0, num_pairs: int = 0) -> float:
        return STEP_S + num_decodes * ROW_S + num_tokens * TOKEN_S


def text(name: str = "v", method: str = MEAN) -> Submit:
    message = submit(name, [9] * TEXT_TOKENS, 1)
    params = msgspec.structs.replace(message.params, pooling=Pooling(method, num_last=1))
    return msgspec.structs.replace(message, params=params)


def request_of(message: Submit) -> Request:
    return Request.from_submit(0, message, frozenset())


def time_of_texts(share: TextShare, num_steps: int = 2000) -> float:
    """Return the seconds that texts take, over those of the decode rows beside them."""
    request, num_texts = request_of(text()), 0
    for _ in range(num_steps):
        share.begin_step(NUM_STREAMS)
        while share.may_begin(request):
            share.spend(request, TEXT_TOKENS, 0)
            num_texts += 1
    decode_s = num_steps * (STEP_S + NUM_STREAMS * ROW_S)
    return num_texts * TEXT_TOKENS * TOKEN_S / decode_s


@pytest.mark.parametrize(
    ("target_ms", "share"),
    [
        (None, MAX_STREAM_SLOWDOWN - 1),
        (20.0, MEAN_AIM * 20.0 / 8.8 - 1),
        (8.8 * 1.05, MIN_TEXT_SHARE),
        (1.0, MIN_TEXT_SHARE),
    ],
)
def test_texts_take_their_share_of_the_time_of_streams(
    target_ms: float | None, share: float
) -> None:
    args = SchedulerArgs(itl_target=target_ms)
    assert time_of_texts(TextShare(args, KnownCosts())) == pytest.approx(share, rel=0.05)


PROMPT_TOKENS, PROMPT_EVERY = 32, 8


@pytest.mark.parametrize(
    ("slowdown", "target_ratio"),
    [(MAX_STREAM_SLOWDOWN, None), (1.3, 1.3), (1 + MIN_TEXT_SHARE, 1.05)],
)
def test_prompts_of_chats_are_time_of_streams_and_leave_less_of_a_target(
    slowdown: float, target_ratio: float | None
) -> None:
    costs = KnownCosts()
    of_prompts = PROMPT_TOKENS * TOKEN_S / PROMPT_EVERY
    alone_s = costs.seconds(NUM_STREAMS) + of_prompts
    target_ms = None if target_ratio is None else 1000 * target_ratio * alone_s / MEAN_AIM
    share = TextShare(SchedulerArgs(itl_target=target_ms), costs)
    chat, embedded = request_of(submit("chat", [5, 6])), request_of(text())
    num_texts, num_steps = 0, 4000
    for step in range(num_steps):
        share.begin_step(NUM_STREAMS)
        if step % PROMPT_EVERY == 0:
            share.spend(chat, PROMPT_TOKENS, 0)
        while share.may_begin(embedded):
            share.spend(embedded, TEXT_TOKENS, 0)
            num_texts += 1
    mean_s = alone_s + num_texts * TEXT_TOKENS * TOKEN_S / num_steps
    assert mean_s / alone_s == pytest.approx(slowdown, rel=0.02)


def test_without_streams_and_for_decisions_there_is_no_bound() -> None:
    share = TextShare(SchedulerArgs(), KnownCosts())
    embedded, decided = request_of(text()), request_of(text("d", LOGPROBS))
    share.begin_step(0)
    share.spend(embedded, 10**6, 0)
    assert share.may_begin(embedded)
    share.begin_step(NUM_STREAMS)
    share.spend(embedded, 10**6, 0)
    assert not share.may_begin(embedded)
    assert share.may_begin(decided)
    share.begin_step(0)
    assert share.may_begin(embedded), "what was owed is forgotten with the streams"


def test_a_chat_passes_texts_that_wait_and_all_of_them_end() -> None:
    world = World(SchedulerArgs(max_batch_size=4))
    world.send(*(text(f"v{number}") for number in range(200)))
    world.step()
    world.send(submit("chat", [5, 6], 12, ignore_eos=True))
    world.run()
    closed = list(world.detok.closed)
    assert closed.index("chat") < 100
    assert world.detok.tokens["chat"] == reference([5, 6], 12, True)
    assert {world.detok.closed[f"v{n}"].vector for n in range(200)} == {
        vector_of([9] * TEXT_TOKENS)
    }
