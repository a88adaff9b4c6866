"""Messages of the live feed for tests."""

from typing import Any

import msgspec

from quadriga.wire.live import (
    LiveEvent,
    LiveGauges,
    LiveRequest,
    LiveStep,
    LiveTree,
    RowKind,
    SkipReason,
)

GAUGES = LiveGauges(1, 2, 0, 10, 7, 1, 2, 5, 30, 10, 9, 0)


def make_request(seq: int, **fields: Any) -> LiveRequest:
    request = LiveRequest(
        seq, f"r{seq}", "abcd", "", 0, 0, 12, 1, 12, 4, 40, 0, 1.0, 2.0, 3.0, ["slots"]
    )
    return msgspec.structs.replace(request, **fields)


def make_step(
    number: int,
    rows: dict[int, RowKind] | None = None,
    skipped: dict[SkipReason, list[int]] | None = None,
    requests: list[LiveRequest] | None = None,
    events: list[LiveEvent] | None = None,
    is_whole: bool = False,
    time: float = 4.0,
    **gauges: int,
) -> LiveStep:
    """Return a message; its rows compute a token each."""
    rows = rows or {}
    return LiveStep(
        number=number,
        step=number,
        time=time,
        seqs=list(rows),
        kinds=list(rows.values()),
        num_tokens=[1] * len(rows),
        num_hidden_rows=0,
        skipped=skipped or {},
        num_hidden_skipped=0,
        requests=requests or [],
        is_whole=is_whole,
        events=events or [],
        ended_steps=[number],
        began_at=[3.0],
        ended_at=[3.5],
        gauges=msgspec.structs.replace(GAUGES, **gauges),
        tree=LiveTree([-1], [3], [2], 3, True) if is_whole else None,
    )
