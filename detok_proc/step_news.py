"""What the frontend has to note of a step of one replica among several."""

import msgspec

from quadriga.wire.messages.replica_news import HeldChoice, ReplicaNews
from quadriga.wire.messages.to_detok import StepNews, StepOutput, StreamReplay, StreamStart


def step_news(output: StepOutput, news: ReplicaNews) -> StepNews:
    """Return what the frontend has to note before it passes the texts of a step on."""
    started = [_held(start, b"", output.time) for start in output.opened]
    if output.replayed and not news.restates:
        replayed = [
            _replayed(replay, output.time) for replay in output.replayed if _is_open(replay)
        ]
        news = msgspec.structs.replace(news, held=[*replayed, *news.held])
    return StepNews(news, started, output.seqs, output.token_ids)


def _is_open(replay: StreamReplay) -> bool:
    return replay.closing is None


def _replayed(replay: StreamReplay, time: float) -> HeldChoice:
    return _held(replay.opening, replay.token_ids, time if replay.token_ids else 0.0)


def _held(start: StreamStart, token_ids: bytes, first_token_at: float) -> HeldChoice:
    return HeldChoice(
        start.seq, start.client, start.request_id, start.index, token_ids, first_token_at,
        start.placement,
    )  # fmt: skip
