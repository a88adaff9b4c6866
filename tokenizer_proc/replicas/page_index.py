"""Which replicas have which blocks of prompts in their prefix caches."""

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)

MAX_BLOCKS = 262_144


class PageIndex(Generic[KeyT]):
    """Sets of replicas by the hashes of blocks, as bits of integers.

    A replica reports the blocks that its cache gains and loses. Beside these, the blocks of a
    request that was sent are expected there until its first token, which comes after the report of
    its blocks: so that requests that arrive together with one new prefix go to one replica.

    A wrong bit costs the computation of a prompt and no more, as each replica looks for itself.

    Args:
        max_blocks: reported blocks; the ones that were not matched for the longest time are
            forgotten first.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._reported: OrderedDict[bytes, int] = OrderedDict()
        self._expected: dict[bytes, dict[int, int]] = {}
        self._of_request: dict[KeyT, tuple[int, list[bytes]]] = {}

    def __len__(self) -> int:
        return len(self._reported)

    @property
    def num_expected(self) -> int:
        """Number of blocks that are expected at some replica."""
        return len(self._expected)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the replicas that have the first block, the first two, and so on, as bits."""
        matched: list[int] = []
        reported, expected = self._reported, self._expected
        holders = -1
        for block in hashes:
            found = reported.get(block, 0)
            if found:
                reported.move_to_end(block)
            if (counts := expected.get(block)) is not None:
                for replica in counts:
                    found |= 1 << replica
            holders &= found
            if not holders:
                break
            matched.append(holders)
        return matched

    def report(self, replica: int, added: Iterable[bytes], evicted: Iterable[bytes]) -> None:
        """Take in which blocks a replica has gained, and has lost after that."""
        reported, bit = self._reported, 1 << replica
        for block in added:
            reported[block] = reported.get(block, 0) | bit
            reported.move_to_end(block)
        for block in evicted:
            self._clear(block, bit)
        while len(reported) > self._max_blocks:
            reported.popitem(last=False)

    def forget_replica(self, replica: int) -> None:
        """Forget what a replica has reported."""
        bit = 1 << replica
        for block in [block for block, holders in self._reported.items() if holders & bit]:
            self._clear(block, bit)

    def _clear(self, block: bytes, bit: int) -> None:
        holders = self._reported.get(block, 0) & ~bit
        if holders:
            self._reported[block] = holders
        else:
            self._reported.pop(block, None)

    # --- expected blocks --------------------------------------------------------------------------

    def expect(self, key: KeyT, replica: int, hashes: list[bytes]) -> None:
        """Expect the blocks of a request at the replica that it is sent to."""
        self.settle(key)
        if not hashes:
            return
        self._of_request[key] = replica, hashes
        for block in hashes:
            counts = self._expected.setdefault(block, {})
            counts[replica] = counts.get(replica, 0) + 1

    def settle(self, key: KeyT) -> None:
        """Expect nothing more of a request: its replica has reported its blocks, or it is over."""
        replica, hashes = self._of_request.pop(key, (0, []))
        for block in hashes:
            counts = self._expected[block]
            counts[replica] -= 1
            if not counts[replica]:
                del counts[replica]
                if not counts:
                    del self._expected[block]
