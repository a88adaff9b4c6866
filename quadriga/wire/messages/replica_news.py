"""scheduler_proc -> detok_proc -> tokenizer_proc, on servers with several replicas only.

What the frontend has to know of a replica to choose the next one for a request, and to move a
request to another replica with the tokens that its client has.
"""

import msgspec


class HeldChoice(msgspec.Struct, array_like=True, frozen=True):
    """An open choice of a request.

    Attributes:
        seq: the scheduler's number.
        index: index of the choice.
        token_ids: generated tokens before those of this message, int32 bytes.
        first_token_at: Unix seconds; 0.0 without a token.
        placement: as in Submit.
    """

    seq: int
    client: bytes
    request_id: str
    index: int
    token_ids: bytes = b""
    first_token_at: float = 0.0
    placement: int = 0


class EndedRequest(msgspec.Struct, array_like=True, frozen=True):
    """A request, the ends of some of whose choices the scheduler can replay.

    Attributes:
        placements: the placement of each of these choices, by index, as in Submit.
    """

    client: bytes
    request_id: str
    placements: dict[int, int] = {}


class ReplicaNews(msgspec.Struct, array_like=True, frozen=True):
    """What the scheduler adds to a step for the frontend.

    Attributes:
        added: joined hashes of blocks that the prefix cache has gained (quadriga/prefix_blocks.py).
        evicted: joined hashes of blocks that it has lost after that.
        num_available: pages that can be allocated.
        restates: nothing that was known before holds any more: `added` has all blocks, `held`
            all open choices, `ended` all ended requests that can be replayed.
        held: choices whose tokens the frontend may not know.
        frontend: number of the newest frontend that has announced itself, as in FrontendRestarted.
    """

    added: bytes = b""
    evicted: bytes = b""
    num_available: int = 0
    restates: bool = False
    held: list[HeldChoice] = []
    ended: list[EndedRequest] = []
    frontend: int = 0
