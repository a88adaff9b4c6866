"""The record of what happened in one step, from which detokenizer and journal are fed."""

from collections import deque
from dataclasses import dataclass, field

from quadriga.sampling.limits import LIMITS
from quadriga.wire.messages.arrays import pack_ids, unpack_ids
from quadriga.wire.messages.logprobs import LogprobBlock, SampledLogprobs
from quadriga.wire.messages.replica_news import ReplicaNews
from quadriga.wire.messages.to_detok import StepOutput, StreamReplay
from quadriga.wire.messages.to_scheduler import Submit
from scheduler_proc.state.plan import StepUpdate
from scheduler_proc.state.request import Request
from scheduler_proc.streams import stream_end, stream_start

MAX_TOP_LOGPROBS = int(LIMITS["logprobs"].maximum or 0)


@dataclass(slots=True)
class StepEvents:
    """Everything that happened since the last record, struct of arrays.

    Attributes:
        accepted: messages that came in, with the requests of their choices.
        time: end of the worker's step, Unix seconds; 0.0 where there was none.
        started: requests that have their first token.
        seqs: numbers of the requests that have a new token, and
        token_ids: these tokens.
        logprobs: logprobs of these tokens, where clients want them; rows are places in `seqs`.
        logprob_requests: the requests of these rows.
        finished: requests that ended, in this order.
        acknowledged: numbers of ended requests whose clients have their ends.
        replayed: streams for a new detokenizer, or for a client that has reconnected.
    """

    accepted: list[tuple[Submit, list[Request]]] = field(default_factory=list)
    time: float = 0.0
    started: list[Request] = field(default_factory=list)
    seqs: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: SampledLogprobs | None = None
    logprob_requests: list[Request] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    acknowledged: list[int] = field(default_factory=list)
    replayed: list[StreamReplay] = field(default_factory=list)

    def add_update(self, update: StepUpdate, time: float) -> None:
        """Take in the tokens of the worker's step that ended at `time`."""
        self.time = time
        self.started, self.seqs, self.token_ids = update.started, update.seqs, update.token_ids

    def add_logprobs(self, sampled: SampledLogprobs, requests: list[Request]) -> None:
        """Take in the logprobs of the step that `requests` ran, after its tokens."""
        places: dict[int, deque[int]] = {}  # of each request, whose tokens are in order
        for place, seq in enumerate(self.seqs):
            places.setdefault(seq, deque()).append(place)
        rows = unpack_ids(sampled.rows).tolist()
        kept = [left.popleft() if (left := places.get(requests[row].seq)) else -1 for row in rows]
        self.logprobs = SampledLogprobs(pack_ids(kept), sampled.block)
        for index, row in enumerate(rows):
            if kept[index] >= 0:
                width = sampled.block.width
                if width > MAX_TOP_LOGPROBS:  # another request has chosen ids
                    width = requests[row].sampling.params.num_top_logprobs or 0
                requests[row].logprobs.append(_entry(sampled.block, index, width))
                self.logprob_requests.append(requests[row])

    @property
    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not (self.accepted or self.acknowledged or self.has_output)

    @property
    def has_output(self) -> bool:
        """Whether there is something for the detokenizer."""
        return bool(self.seqs or self.finished or self.replayed)

    def to_detok(
        self,
        now: float,
        num_waiting: int,
        wait_s: float | None,
        session: int,
        news: ReplicaNews | None,
        finished: list[Request],
    ) -> StepOutput:
        """Return the message for the detokenizer of this session.

        `finished` are the requests whose ends it has; a replay to come has those of the others.
        """
        return StepOutput(
            time=self.time or now,
            opened=[stream_start(request) for request in self.started],
            seqs=self.seqs,
            token_ids=pack_ids(self.token_ids),
            closed=[stream_end(request) for request in finished],
            logprobs=self.logprobs,
            waiting=num_waiting,
            session=session,
            replayed=self.replayed,
            wait_s=wait_s,
            news=news,
        )


def _entry(block: LogprobBlock, index: int, width: int) -> LogprobBlock:
    """Return the logprobs of one token of a block, with the first `width` further tokens."""
    value = slice(4 * index, 4 * index + 4)
    top = slice(4 * index * block.width, 4 * (index * block.width + width))
    return LogprobBlock(block.values[value], width, block.top_ids[top], block.top_values[top])
