"""Replicas with roles in a simulation: the pages that they exchange, and who is handed a request.

A page takes a share of the time in which its tokens are computed, once to store and once to load.
"""

from collections.abc import Callable

from quadriga.server.prefix_blocks import PAGE_HASH_BYTES, split_hashes
from quadriga.wire.packing import num_ids
from quadriga.wire.worker import LoadPages, PagesLoaded, ResultMessage, StoredPages, StorePages
from simulator.clock import Clock
from simulator.cost_model import FEATURES, CostModel

# Of SmolLM2-135M on a CPU. A page of Llama 8B takes an H100 longer to copy than to compute.
COPY_SHARE = 0.04


class SimulatedExchange:
    """The pages that replicas have computed for others, without a bound.

    Attributes:
        page_s: seconds in which a page is stored, or loaded.
    """

    def __init__(self, model: CostModel, page_size: int, copy_share: float) -> None:
        per_token = dict(zip(FEATURES, model.prices, strict=True))
        token_s = per_token["tokens"] + per_token["tokens_beyond"]
        self.page_s = copy_share * page_size * token_s
        self._names: set[bytes] = set()

    def store(self, names: bytes) -> None:
        """Keep pages. names: joined."""
        self._names.update(split_hashes(names, PAGE_HASH_BYTES))

    def num_found(self, names: bytes) -> int:
        """Return how many of the first pages of a load are there."""
        count = 0
        for name in split_hashes(names, PAGE_HASH_BYTES):
            if name not in self._names:
                break
            count += 1
        return count


class SimulatedMover:
    """Moves the pages of a simulated worker, one transfer after the other, beside its steps.

    Args:
        exchange: the pages of all replicas.
        clock: the simulated clock.
        deliver: called with the time at which the scheduler has a report, and the report.
    """

    def __init__(
        self,
        exchange: SimulatedExchange,
        clock: Clock,
        deliver: Callable[[float, ResultMessage], None],
    ) -> None:
        self._exchange = exchange
        self._clock = clock
        self._deliver = deliver
        self._free_at = 0.0

    def store(self, message: StorePages, computed_at: float) -> None:
        """Store pages that steps up to a time compute."""
        ended_at = self._run(len(message.hashes) // PAGE_HASH_BYTES, computed_at)
        self._exchange.store(message.hashes)
        self._deliver(ended_at, StoredPages(message.hashes, b"", message.session))

    def load(self, message: LoadPages) -> None:
        """Load pages, up to the first one that is missing."""
        num_found = self._exchange.num_found(message.hashes)
        assert num_found <= num_ids(message.pages)
        began_at = max(self._clock.now, self._free_at)
        ended_at = self._run(num_found, began_at)
        seconds = ended_at - self._clock.now
        report = PagesLoaded(message.load, num_found, message.session, seconds, num_found)
        self._deliver(ended_at, report)

    def _run(self, num_pages: int, earliest_at: float) -> float:
        """Return when a transfer of so many pages has ended."""
        began_at = max(self._clock.now, self._free_at, earliest_at)
        self._free_at = began_at + num_pages * self._exchange.page_s
        return self._free_at
