"""Questions to all replicas: an answer is made of theirs once the last one has come."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from quadriga.wire.messages.to_client import Info, ProgressAnswer, RequestProgress, RequestState
from quadriga.wire.messages.to_scheduler import InfoRequest, ProgressRequest
from tokenizer_proc.replicas.merged_info import merged_info
from tokenizer_proc.replicas.placed import Name

# More are not open: the frontend bounds them.
MAX_QUESTIONS = 1024
Answer = Info | ProgressAnswer
_decode = msgspec.msgpack.Decoder(Answer).decode


class MergedAnswer(NamedTuple):
    """The answer to the question of a client."""

    client: bytes
    message: Answer


@dataclass(slots=True)
class _Question:
    question: InfoRequest | ProgressRequest
    waits_for: set[int]
    answers: dict[int, Answer] = field(default_factory=dict)


class Questions:
    """Gather the answers of the replicas that were asked."""

    def __init__(self) -> None:
        self._open: OrderedDict[Name, _Question] = OrderedDict()

    def ask(self, question: InfoRequest | ProgressRequest, replicas: Iterable[int]) -> None:
        """Await the answers of these replicas."""
        self._open[question.client, question.request_id] = _Question(question, set(replicas))
        while len(self._open) > MAX_QUESTIONS:
            self._open.popitem(last=False)

    def take(self, replica: int, client: bytes, payload: bytes) -> MergedAnswer | None:
        """Take in an answer. Return what the client gets, once the last one is there."""
        answer = _decode(payload)
        name = client, answer.request_id
        asked = self._open.get(name)
        if asked is None or replica not in asked.waits_for:
            return None
        asked.answers[replica] = answer
        asked.waits_for.discard(replica)
        return None if asked.waits_for else self._finish(name)

    def give_up(self, replica: int) -> Iterator[MergedAnswer]:
        """Do not wait for a replica that has died. Yield the answers that are complete without."""
        for name, asked in list(self._open.items()):
            if replica in asked.waits_for:
                asked.waits_for.discard(replica)
                if not asked.waits_for and asked.answers:
                    yield self._finish(name)

    def _finish(self, name: Name) -> MergedAnswer:
        asked = self._open.pop(name)
        question, answers = asked.question, asked.answers
        if isinstance(question, InfoRequest):
            infos = {n: a.values for n, a in answers.items() if isinstance(a, Info)}
            return MergedAnswer(name[0], Info(name[1], merged_info(question.values, infos)))
        of_replicas = [a.values for a in answers.values() if isinstance(a, ProgressAnswer)]
        known = [max(values, key=_is_known) for values in zip(*of_replicas, strict=True)]
        return MergedAnswer(name[0], ProgressAnswer(name[1], known))


def _is_known(progress: RequestProgress) -> bool:
    return progress.state is not RequestState.UNKNOWN
