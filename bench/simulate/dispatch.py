"""The frontend's router in a simulation of several replicas."""

import time
from collections import Counter
from dataclasses import dataclass

import numpy as np

from quadriga.config.server_config import ServerConfig
from quadriga.prefix_blocks import block_hashes, pages_per_block
from quadriga.wire.messages.arrays import num_ids
from quadriga.wire.messages.to_detok import ReplicaOutput
from quadriga.wire.messages.to_scheduler import Submit
from tokenizer_proc.replicas.router import Prompt, Router


@dataclass(frozen=True, slots=True)
class Routing:
    """What the router has decided.

    Attributes:
        why: how often each reason decided (tokenizer_proc/replicas/router.py).
        decision_us_p50, decision_us_p99: wall time of a decision, with the hashes of its prompt.
        num_blocks: blocks in the index at the end.
    """

    why: dict[str, int]
    decision_us_p50: float
    decision_us_p99: float
    num_blocks: int

    @property
    def line(self) -> str:
        """The printed line."""
        why = ", ".join(f"{count} {reason}" for reason, count in self.why.items())
        return (
            f"Routing: {why}; a decision takes {self.decision_us_p50:.0f} us"
            f" (p99 {self.decision_us_p99:.0f}), {self.num_blocks} blocks in the index"
        )


class Dispatcher:
    """Place requests on replicas, and keep the router informed.

    Attributes:
        why: how often each reason decided.
        decision_us: wall time of each decision, hashes included.
    """

    def __init__(self, config: ServerConfig, method: str, num_replicas: int) -> None:
        page_size = config.worker.page_size
        self._block_tokens = page_size * pages_per_block(page_size)
        self.router = Router[str](
            method,
            num_replicas,
            self._block_tokens,
            page_size,
            config.scheduler.max_queued_requests,
        )
        self.why: Counter[str] = Counter()
        self.decision_us: list[float] = []

    def place(self, message: Submit) -> int:
        """Return the number of the replica that gets a request."""
        began = time.perf_counter()
        hashes = block_hashes(message.prompt_ids, self._block_tokens, message.cache_salt.encode())
        prompt = Prompt(num_ids(message.prompt_ids), hashes)
        routed = self.router.place(message.request_id, prompt)
        self.decision_us.append(1e6 * (time.perf_counter() - began))
        self.why[routed.why] += 1
        return routed.replica

    def take_output(self, replica: int, output: ReplicaOutput) -> None:
        """Take in what a replica has reported with a step."""
        assert output.news is not None
        self.router.on_news(replica, output.news)
        for started in output.opened:
            self.router.on_start(started.request_id, 0)
        for closed in output.closed:
            self.router.on_end(closed.request_id, 0)

    def figures(self) -> Routing:
        """Return what the router has decided."""
        p50, p99 = np.percentile(self.decision_us or [0.0], [50, 99])
        return Routing(dict(self.why), float(p50), float(p99), len(self.router.index))
