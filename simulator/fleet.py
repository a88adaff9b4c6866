"""The replicas of a simulated server and the router in front of them.

Replicas may be lost, come back, be added and leave; the router is the frontend's.
"""

import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count, islice

import msgspec
import numpy as np

from cluster_proc.scaling import Scaling
from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import CountOrAuto
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.prefix_blocks import pages_per_block
from quadriga.wire import packing, to_detok, to_scheduler
from simulator.clock import Clock
from simulator.records import Records
from simulator.replica import Replica, draw_ids
from tokenizer_proc.replicas.placed import Name, PlacedRequest
from tokenizer_proc.replicas.roles import RoleRouter, roles_of
from tokenizer_proc.replicas.router import Routed, Router

# The frontend's router in a simulation of several replicas.

# One in TIMED_EVERY decisions and reports is timed: to read the CPU time of a thread is a system
# call, in which a busy machine runs other processes.
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

    def __init__(
        self, config: ServerConfig, method: str, num_replicas: int, prefill: CountOrAuto = 0
    ) -> None:
        page_size = config.worker.page_size
        self._block_tokens = page_size * pages_per_block(page_size)
        self._seen: set[bytes] = set()
        self._ideal_blocks = 0
        self._report_s = 0.0
        self._num_reports = 0
        self._num_timed = 0
        limits = config.scheduler
        shape = method, num_replicas, self._block_tokens, page_size, limits.max_queued_requests
        self.router = Router[Name](*shape)
        if prefill:
            self.router = RoleRouter(roles_of(prefill, num_replicas, limits), *shape)
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

    def find_next(self, placed: PlacedRequest, replica: int) -> Routed | None:
        """Return where a request goes on whose prompt a replica has computed, and count it there.

        None: it stays.
        """
        prompt = placed.prompt(self._block_tokens)
        routed = self.router.find_next(prompt, replica)
        if routed is not None:
            self.router.on_end(placed.name, 0)
            self.router.count(placed.name, routed.replica, prompt, routed.num_cached)
        return routed

    def choose_ahead(self, placed: PlacedRequest, replica: int) -> int | None:
        """Return where pages are loaded of a prompt that a replica computes; None: nowhere."""
        prompt = placed.prompt(self._block_tokens)
        return self.router.choose_ahead(prompt, replica, placed.ahead)

    def _count_ideal(self, hashes: list[bytes]) -> None:
        """Count the blocks that any earlier request had."""
        seen = self._seen
        for block in hashes:
            if block not in seen:
                break
            self._ideal_blocks += 1
        seen.update(hashes)

    def take_output(self, replica: int, output: to_detok.StepOutput) -> None:
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

    def take_ends(self, output: to_detok.StepOutput) -> None:
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


# The replicas of a simulated server, which may be lost, come back, be added and leave.
#
# Requests are placed by the frontend's router, and move with their tokens as they do in a server.

# Between two looks at the load, as the frontend reports it at most so often.
LOAD_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Loss:
    """Replicas that are lost at a time.

    Attributes:
        count: number of replicas.
        at: seconds after the start.
    """

    count: int
    at: float

    @classmethod
    def parse(cls, text: str) -> "Loss":
        """Read COUNT@SECONDS, or raise ConfigError."""
        count, _, at = text.partition("@")
        try:
            loss = cls(int(count), float(at))
        except ValueError:
            loss = cls(0, 0.0)
        if loss.count < 1 or not loss.at >= 0:
            raise ConfigError(f"--lose is {text!r}: give COUNT@SECONDS, such as 100@20")
        return loss


@dataclass(slots=True)
class FleetCounts:
    """What happened to the replicas.

    Attributes:
        num_lost: replicas that were lost.
        num_left: replicas that left, after they had given their requests back.
        num_moved: requests that moved to another replica.
        num_handed_over: requests that went on at another replica when their prompt was computed.
        num_role_changes: how often the number of replicas that compute prompts changed.
        num_computed_again: tokens of moved requests that had been computed, and were not cached
            where they went.
    """

    num_lost: int = 0
    num_left: int = 0
    num_moved: int = 0
    num_computed_again: int = 0
    num_handed_over: int = 0
    num_role_changes: int = 0


class Fleet:
    """Send requests to their replicas, and move them when these are lost or leave.

    Args:
        num_replicas: number of replicas at first.
        make_replica: makes the replica of a number, which reports to the fleet.
        dispatcher: chooses the replica of a request; None: there is one only.
        records: of all requests.
        clock: the simulated clock.
        delivery_s: seconds from a scheduler to the frontend.
        vocab_size: of the simulated model.

    Attributes:
        counts: what happened.
        gone: replicas that were lost or have left.
    """

    def __init__(
        self,
        num_replicas: int,
        make_replica: Callable[[int, "Fleet"], Replica],
        dispatcher: Dispatcher | None,
        records: Records,
        clock: Clock,
        delivery_s: float,
        vocab_size: int,
    ) -> None:
        self._make_replica = make_replica
        self._dispatcher = dispatcher
        self._records = records
        self._clock = clock
        self._delivery_s = delivery_s
        self._vocab_size = vocab_size
        self._serving: dict[int, Replica] = {}
        self._starting: set[int] = set()
        self._open: dict[str, PlacedRequest] = {}
        self._waiting: dict[str, PlacedRequest] = {}
        self._leaving: set[int] = set()
        # By replica, and by index of the request.
        self._movable: dict[int, dict[int, to_detok.MovableChoice]] = {}
        self._scaling: Scaling | None = None
        self._start_s = 0.0
        self._is_watching = False
        self.counts = FleetCounts()
        self.gone: list[Replica] = []
        for number in range(num_replicas):
            self._start(number)

    @property
    def serving(self) -> list[Replica]:
        """The replicas that are there."""
        return list(self._serving.values())

    @property
    def serving_numbers(self) -> list[int]:
        """The numbers of these."""
        return list(self._serving)

    def imbalance(self, rows: list[int]) -> tuple[float, float]:
        """Return p99 over mean of the replicas' rows, and of the prompt tokens that wait there."""
        if self._dispatcher is None:
            return 1.0, 1.0
        loads = self._dispatcher.router.ledger.loads
        queued = [loads[number].num_prefill_tokens for number in self._serving]
        return _p99_over_mean(rows), _p99_over_mean(queued)

    # --- requests ---------------------------------------------------------------------------------

    def send(self, message: to_scheduler.Submit) -> Replica | None:
        """Send a request to a replica, and return it; None while there is none."""
        if self._dispatcher is None:
            replica = self._serving[0]
            self._clock.at(message.tokenized_at, replica.take_message, message)
            return replica
        placed = PlacedRequest((message.client, message.request_id), message)
        self._open[message.request_id] = placed
        self._place(placed)
        self._watch_load()
        number = placed.choice(0).replica
        return None if number is None else self._serving[number]

    def _place(self, placed: PlacedRequest) -> None:
        dispatcher, (_, request_id) = self._dispatcher, placed.name
        assert dispatcher is not None
        if not dispatcher.router.has_replica:
            self._waiting[request_id] = placed
            return
        routed = dispatcher.place(placed)
        placed.choice(0).replica = routed.replica
        moves_on = dispatcher.router.hands_over(routed.replica)
        message = msgspec.structs.replace(placed.next_submit(), moves_on=moves_on)
        if placed.is_moving:
            num_known = packing.num_ids(message.prompt_ids) + len(placed.choice(0).token_ids)
            self.counts.num_computed_again += max(0, num_known - 1 - routed.num_cached)
        when = max(message.tokenized_at, self._clock.now)
        self._clock.at(when, self._serving[routed.replica].take_message, message)

    def end(self, request_id: str) -> None:
        """Take in that a request has ended."""
        self._open.pop(request_id, None)
        self._waiting.pop(request_id, None)

    def take_output(self, replica: Replica, output: to_detok.StepOutput) -> None:
        """Give the router what a replica reports, as late as the frontend has it."""
        self._clock.at(output.time + self._delivery_s, partial(self._note, replica), output)

    def _note(self, replica: Replica, output: to_detok.StepOutput) -> None:
        assert self._dispatcher is not None
        if self._serving.get(replica.number) is replica:
            self._dispatcher.take_output(replica.number, output)
            assert output.news is not None
            for choice in output.news.movable:
                movable = self._movable.setdefault(replica.number, {})
                movable[replica.index_of(choice.seq)] = choice
            if self._dispatcher.router.follow_load(self._clock.now):
                self.counts.num_role_changes += 1
            self._hand_over()
            for stored in output.news.stored:
                self._load_ahead(replica.number, stored)
        else:
            self._dispatcher.take_ends(output)

    # --- roles ------------------------------------------------------------------------------------

    def owns(self, replica: Replica, index: int) -> bool:
        """Return whether what a replica generates for a request counts. index: of the request."""
        placed = self._open.get(str(index))
        return placed is not None and placed.choice(0).replica == replica.number

    def _hand_over(self) -> None:
        """Let requests whose prompts are computed go on at replicas that generate tokens."""
        assert self._dispatcher is not None
        movable = [
            (number, index, facts)
            for number, of_replica in self._movable.items()
            if of_replica and self._dispatcher.router.hands_over(number)
            for index, facts in of_replica.items()
        ]
        for number, index, facts in movable:
            placed, replica = self._open.get(str(index)), self._serving.get(number)
            if placed is None or replica is None or placed.choice(0).replica != number:
                del self._movable[number][index]
                continue
            self._note_tokens(placed)
            routed = self._dispatcher.find_next(placed, number)
            if routed is None:
                continue
            del self._movable[number][index]
            self.counts.num_handed_over += 1
            choice = placed.choice(0)
            choice.replica, placed.is_moving = routed.replica, True
            choice.admitted_at, choice.cached_tokens = facts.admitted_at, facts.cached_tokens
            replica.take_message(to_scheduler.Withdraw([facts.seq]))
            self._serving[routed.replica].take_message(placed.next_submit())

    def _load_ahead(self, number: int, stored: to_detok.StoredPrompt) -> None:
        """Let a replica load the first pages of a prompt while another one computes the last."""
        assert self._dispatcher is not None
        placed = self._open.get(stored.request_id)
        if placed is None or placed.choice(0).replica != number:
            return
        placed.ahead = self._dispatcher.choose_ahead(placed, number)
        if placed.ahead is not None:
            self._serving[placed.ahead].take_message(placed.beginning(stored.num_tokens))

    # --- losses and returns -----------------------------------------------------------------------

    def lose(self, numbers: list[int]) -> None:
        """Lose replicas; their requests go on at the others."""
        moved: list[PlacedRequest] = []
        self.counts.num_lost += len(numbers)
        for number in numbers:
            self._leaving.discard(number)
            self._remove(number)
        for placed in self._open.values():
            if placed.choice(0).replica in numbers:
                placed.num_losses += 1
                moved.append(placed)
        self._move(moved)

    def add(self, number: int) -> None:
        """Let a replica serve, and give it the requests that wait."""
        if number not in self._serving:
            self._start(number)
            waiting, self._waiting = self._waiting, {}
            for placed in waiting.values():
                self._place(placed)

    def _start(self, number: int) -> None:
        self._starting.discard(number)
        self._serving[number] = self._make_replica(number, self)
        if self._dispatcher is not None:
            self._dispatcher.router.set_up(number, True)

    def _remove(self, number: int) -> None:
        assert self._dispatcher is not None
        self._dispatcher.router.set_up(number, False)
        replica = self._serving.pop(number)
        replica.ended_at = self._clock.now
        self.gone.append(replica)

    def _move(self, moved: list[PlacedRequest]) -> None:
        assert self._dispatcher is not None
        for placed in moved:
            self.counts.num_moved += 1
            placed.choice(0).leave_replica()
            placed.is_moving = True
            self._dispatcher.router.forget(placed.name)
            self._note_tokens(placed)
            self._place(placed)

    def _note_tokens(self, placed: PlacedRequest) -> None:
        """Note the tokens of a request that moves; a server notes them with each step."""
        assert placed.submit is not None
        index, records = int(placed.name[1]), self._records
        num_tokens = int(records["completion_tokens"][index])
        if not num_tokens:
            return
        first = packing.num_ids(placed.submit.prompt_ids)
        positions = np.arange(first, first + num_tokens)
        tokens = draw_ids(np.array([index]), positions, self._vocab_size)
        choice = placed.choice(0)
        choice.token_ids = array("i", tokens.tolist())
        choice.first_token_at = float(records["first_token"][index])

    # --- the number of replicas -------------------------------------------------------------------

    def follow_load(self, scaling: Scaling, start_s: float) -> None:
        """Let the number of replicas follow the load from now on.

        Args:
            scaling: decides their number.
            start_s: seconds from the decision to add a replica until it serves.
        """
        self._scaling, self._start_s = scaling, start_s

    def _watch_load(self) -> None:
        """Look at the load again and again, until there is none and no replica may leave."""
        if self._scaling is not None and not self._is_watching:
            self._is_watching = True
            self._clock.at(self._clock.now + LOAD_INTERVAL_S, self._scale, None)

    def _scale(self, _: None) -> None:
        assert self._scaling is not None
        self._is_watching = False
        self._scaling.on_load(len(self._open), self._clock.now)
        wanted = self._scaling.decide(self._clock.now)
        staying = [n for n in self._serving if n not in self._leaving]
        numbers = (n for n in count() if n not in self._serving and n not in self._starting)
        for number in islice(numbers, max(0, wanted - len(staying) - len(self._starting))):
            self._starting.add(number)
            self._clock.at(self._clock.now + self._start_s, self.add, number)
        for number in sorted(staying)[wanted:]:
            self._recall(number)
        if self._open or self._scaling.wake_at is not None:
            self._watch_load()

    def _recall(self, number: int) -> None:
        """Let a replica give its requests back, and leave."""
        assert self._dispatcher is not None
        self._leaving.add(number)
        self._dispatcher.router.set_up(number, False)
        self._serving[number].take_message(to_scheduler.Recall(1))

    def take_back(self, replica: Replica) -> None:
        """Move the requests of a replica that has given them back, when the frontend knows it."""
        self._clock.at(self._clock.now + self._delivery_s, self._on_handed_back, replica)

    def _on_handed_back(self, replica: Replica) -> None:
        number = replica.number
        if self._serving.get(number) is not replica:
            return
        self._leaving.discard(number)
        self.counts.num_left += 1
        self._remove(number)
        self._move([p for p in self._open.values() if p.is_at(number)])


def _p99_over_mean(values: list[int]) -> float:
    mean = float(np.mean(values)) if values else 0.0
    return float(np.percentile(values, 99)) / mean if mean else 1.0
