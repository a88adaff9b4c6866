"""Questions to all replicas: an answer is made of theirs once the last one has come.

`merged_info` makes the server's info of the infos of its replicas.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from quadriga.wire.client import Info, InfoValues, ProgressAnswer, RequestProgress, RequestState
from quadriga.wire.to_scheduler import InfoRequest, ProgressRequest
from tokenizer_proc.replicas.placed import Name

# Values that are the same for all, or of which the largest says most; all other numbers are added.
LARGEST = frozenset(
    {"page_size", "chunked_prefill_size", "new_token_ratio", "step_gap_ms_p50", "step_gap_ms_p99"}
)
JOURNAL_FAILED = "failed"


def merged_info(
    asked: InfoValues, infos: Mapping[int, InfoValues], lists_replicas: bool
) -> InfoValues:
    """Return the info of a server.

    Args:
        asked: what the frontend has put into the question, which is in each answer.
        infos: the answers by the numbers of the replicas, at least one.
        lists_replicas: add the values of each, and its number to the names of its processes.
            Without, the only answer is that of the server.
    """
    if not lists_replicas:
        return next(iter(infos.values()))
    own = {
        number: {name: value for name, value in values.items() if name not in asked}
        for number, values in infos.items()
    }
    merged: InfoValues = dict(asked)
    for name in dict.fromkeys(name for values in own.values() for name in values):
        merged[name] = _merged(name, [values[name] for values in own.values() if name in values])
    merged["pids"] = _pids(asked, infos)
    merged["replicas"] = [{"replica": number, **own[number]} for number in sorted(own)]
    return merged


def _merged(name: str, values: Sequence[Any]) -> Any:
    first = values[0]
    if name == "ready":
        return any(values)
    if name == "journal":
        return JOURNAL_FAILED if JOURNAL_FAILED in values else first
    if name in LARGEST:
        return max((value for value in values if value is not None), default=None)
    return _added(values)


def _added(values: Sequence[Any]) -> Any:
    """Return the sum of numbers, of the items of maps and of lists; of anything else the first."""
    first = values[0]
    if isinstance(first, dict):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: _added([v[name] for v in values if name in v]) for name in names}
    if isinstance(first, list):
        return [_added(items) for items in zip(*values, strict=True)]
    if isinstance(first, (int, float)) and not isinstance(first, bool):
        return sum(values)
    return next((value for value in values if value is not None), None)


def _pids(asked: InfoValues, infos: Mapping[int, InfoValues]) -> dict[str, int]:
    """Return the pids of all processes; those of a replica are called as in the log."""
    pids = dict(asked.get("pids") or {})
    for number, values in sorted(infos.items()):
        for name, pid in (values.get("pids") or {}).items():
            if name not in (asked.get("pids") or {}):
                pids[f"{name}/{number}"] = pid
    return pids


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
    """Gather the answers of the replicas that were asked.

    Args:
        lists_replicas: as in merged_info.
    """

    def __init__(self, lists_replicas: bool) -> None:
        self._lists_replicas = lists_replicas
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
        """Do not wait for a replica that has died, unless there is no other answer.

        Yield the answers that are complete without it.
        """
        for name, asked in list(self._open.items()):
            if replica in asked.waits_for and (asked.answers or len(asked.waits_for) > 1):
                asked.waits_for.discard(replica)
                if not asked.waits_for:
                    yield self._finish(name)

    def _finish(self, name: Name) -> MergedAnswer:
        asked = self._open.pop(name)
        question, answers = asked.question, asked.answers
        if isinstance(question, InfoRequest):
            infos = {n: a.values for n, a in answers.items() if isinstance(a, Info)}
            merged = merged_info(question.values, infos, self._lists_replicas)
            return MergedAnswer(name[0], Info(name[1], merged))
        of_replicas = [a.values for a in answers.values() if isinstance(a, ProgressAnswer)]
        known = [max(values, key=_is_known) for values in zip(*of_replicas, strict=True)]
        return MergedAnswer(name[0], ProgressAnswer(name[1], known))


def _is_known(progress: RequestProgress) -> bool:
    return progress.state is not RequestState.UNKNOWN
