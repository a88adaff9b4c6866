"""The frontend's router in a simulation of several replicas."""

import time
from collections import Counter
from dataclasses import dataclass

import numpy as np

from quadriga.config.server_config import ServerConfig
from quadriga.prefix_blocks import pages_per_block
from quadriga.wire.messages.to_detok import StepOutput
from tokenizer_proc.replicas.placed import Name, PlacedRequest
from tokenizer_proc.replicas.router import Routed, Router

# One in so many decisions and reports is timed: to read the CPU time of a thread is a system call,
# in which a busy machine runs other processes.
TIMED_EVERY = 16


@dataclass(frozen=True, slots=True)
class Routing:
    """What the router has decided.

    Attributes:
        why: how often each reason decided (tokenizer_proc/replicas/router.py).
        decision_us_p50, decision_us_p99: CPU time of a decision, with the hashes of its prompt.
        num_blocks: blocks in the index at the end.
        ideal_cached_tokens: prompt tokens that one cache for all requests, without a bound, would
            have had when they were sent.
        report_us: mean CPU time of a replica's report of a step.
        num_reports: number of these.
    """

    why: dict[str, int]
    decision_us_p50: float
    decision_us_p99: float
    num_blocks: int
    ideal_cached_tokens: int
    report_us: float
    num_reports: int

    def lines(self, duration: float) -> list[str]:
        """Return the printed lines. duration: simulated seconds."""
        num_decisions = sum(self.why.values())
        core_s = 1e-6 * (self.decision_us_p50 * num_decisions + self.report_us * self.num_reports)
        return [
            self._decisions,
            f"Router: {num_decisions / duration:.0f} decisions/s and"
            f" {self.num_reports / duration:.0f} reports/s of {self.report_us:.0f} us each:"
            f" {core_s / duration:.0%} of a core",
            f"An unbounded cache for all would have: {self.ideal_cached_tokens} tokens",
        ]

    @property
    def _decisions(self) -> str:
        why = ", ".join(f"{count} {reason}" for reason, count in self.why.items())
        return (
            f"Routing: {why}; a decision takes {self.decision_us_p50:.0f} us"
            f" (p99 {self.decision_us_p99:.0f}), {self.num_blocks} blocks in the index"
        )


class Dispatcher:
    """Place requests on replicas, and keep the router informed.

    Attributes:
        router: that of the frontend. Its replicas take requests once they are set up.
        why: how often each reason decided.
        decision_us: CPU time of timed decisions, hashes included.
    """

    def __init__(self, config: ServerConfig, method: str, num_replicas: int) -> None:
        page_size = config.worker.page_size
        self._block_tokens = page_size * pages_per_block(page_size)
        self._seen: set[bytes] = set()
        self._ideal_blocks = 0
        self._report_s = 0.0
        self._num_reports = 0
        self._num_timed = 0
        self.router = Router[Name](
            method,
            num_replicas,
            self._block_tokens,
            page_size,
            config.scheduler.max_queued_requests,
        )
        for number in range(num_replicas):
            self.router.set_up(number, False)
        self.why: Counter[str] = Counter()
        self.decision_us: list[float] = []

    def place(self, placed: PlacedRequest) -> Routed:
        """Choose the replica of a request."""
        is_timed = self.why.total() % TIMED_EVERY == 0
        began = time.thread_time() if is_timed else 0.0
        prompt = placed.prompt(self._block_tokens)
        routed = self.router.place(placed.name, prompt)
        if is_timed:
            self.decision_us.append(1e6 * (time.thread_time() - began))
        self.why[routed.why] += 1
        if not placed.is_moving:
            self._count_ideal(prompt.hashes)
        return routed

    def _count_ideal(self, hashes: list[bytes]) -> None:
        """Count the blocks that any earlier request had."""
        seen = self._seen
        for block in hashes:
            if block not in seen:
                break
            self._ideal_blocks += 1
        seen.update(hashes)

    def take_output(self, replica: int, output: StepOutput) -> None:
        """Take in what a replica has reported with a step."""
        assert output.news is not None
        is_timed = self._num_reports % TIMED_EVERY == 0
        began = time.thread_time() if is_timed else 0.0
        self.router.on_news(replica, output.news)
        for started in output.opened:
            self.router.on_start((started.client, started.request_id), 0)
        for replay in output.replayed:
            if replay.token_ids:
                self.router.on_start((replay.opening.client, replay.opening.request_id), 0)
        self.take_ends(output)
        if is_timed:
            self._report_s += time.thread_time() - began
            self._num_timed += 1
        self._num_reports += 1

    def take_ends(self, output: StepOutput) -> None:
        """Take in the ends of a step only, of a replica that is gone."""
        ends = (replay.closing for replay in output.replayed)
        for closed in (*output.closed, *(end for end in ends if end is not None)):
            self.router.on_end((closed.client, closed.request_id), 0)

    def figures(self) -> Routing:
        """Return what the router has decided."""
        p50, p99 = np.percentile(self.decision_us or [0.0], [50, 99])
        return Routing(
            why=dict(self.why),
            decision_us_p50=float(p50),
            decision_us_p99=float(p99),
            num_blocks=len(self.router.index),
            ideal_cached_tokens=self._ideal_blocks * self._block_tokens,
            report_us=1e6 * self._report_s / max(1, self._num_timed),
            num_reports=self._num_reports,
        )
