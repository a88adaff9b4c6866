"""scheduler_proc -> detok_proc -> tokenizer_proc, on servers with several replicas only.

What the frontend has to know of a replica to choose the next one for a request, and to move a
request to another replica with the tokens that its client has.
"""

import msgspec

from quadriga.wire.messages.to_detok import Delivered, StepOutput


class HeldChoice(msgspec.Struct, array_like=True, frozen=True):
    """A choice of a request that has its first token.

    Attributes:
        seq: the scheduler's number.
        index: index of the choice.
        token_ids: generated tokens before those of this message, int32 bytes.
        first_token_at: Unix seconds; 0.0 without a token.
    """

    seq: int
    client: bytes
    request_id: str
    index: int
    token_ids: bytes = b""
    first_token_at: float = 0.0


class ReplicaNews(msgspec.Struct, array_like=True, frozen=True):
    """What the scheduler adds to a step for the frontend.

    Attributes:
        added: joined hashes of blocks that the prefix cache has gained (quadriga/prefix_blocks.py).
        evicted: joined hashes of blocks that it has lost after that.
        num_available: pages that can be allocated.
        restates: nothing that was known before holds any more: `added` has all blocks, `held`
            all open choices, `ended` the names of ended requests that can be replayed.
        held: choices whose tokens the frontend does not know.
        ended: client and id of each request.
    """

    added: bytes = b""
    evicted: bytes = b""
    num_available: int = 0
    restates: bool = False
    held: list[HeldChoice] = []
    ended: list[tuple[bytes, str]] = []


class ReplicaOutput(StepOutput, tag="output", array_like=True, frozen=True):
    """A StepOutput in the form that is read. `news` is None where there is one replica."""

    news: ReplicaNews | None = None


class StepNews(msgspec.Struct, array_like=True, frozen=True):
    """What the frontend notes of a step before it passes the step's texts on.

    Attributes:
        started: choices that have their first token with this step.
        seqs: number of the request of each token.
        token_ids: int32 bytes, one per item of `seqs`.
    """

    news: ReplicaNews
    started: list[HeldChoice]
    seqs: list[int]
    token_ids: bytes


class ReplicaDelivered(Delivered, array_like=True, frozen=True):
    """A Delivered in the form that is read.

    Attributes:
        indexes: the choices that end, one for each item of `ended`; empty with one replica.
    """

    indexes: list[int] = msgspec.field(default_factory=list)


def step_news(output: StepOutput, news: ReplicaNews) -> StepNews:
    """Return what the frontend has to note of a step."""
    started = [
        HeldChoice(start.seq, start.client, start.request_id, start.index, b"", output.time)
        for start in output.opened
    ]
    replayed = [
        HeldChoice(
            start.seq, start.client, start.request_id, start.index, replay.token_ids, output.time
        )
        for replay in output.replayed
        if (start := replay.opening) and replay.closing is None and replay.token_ids
    ]
    if replayed and not news.restates:
        news = msgspec.structs.replace(news, held=[*replayed, *news.held])
    return StepNews(news, started, output.seqs, output.token_ids)
