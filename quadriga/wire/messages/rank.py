"""Rank 0 of a worker -> ranks on other machines: these, and every message that rank 0 receives."""

import msgspec

from quadriga.wire.messages.worker import WorkerMessage


class JoinRanks(msgspec.Struct, tag="join", array_like=True, frozen=True):
    """The first message: load the model's part and join the other ranks.

    Attributes:
        meeting: tcp://HOST:PORT at which the ranks find each other.
        lifeline: address to which the rank keeps a connection; rank 0 has ended when it breaks.
    """

    meeting: str
    lifeline: str


RankMessage = JoinRanks | WorkerMessage
