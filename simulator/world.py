"""A simulated run: clients that send a trace, and the replicas that receive it."""

from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import msgspec
import numpy as np

from quadriga.errors import QuadrigaError
from quadriga.server.config import engine_args, server_config
from quadriga.wire import client, to_detok, to_scheduler
from simulator import cost_model, latency, records, trace
from simulator.clock import START, Clock
from simulator.fleet import Dispatcher, Fleet, Loss
from simulator.replica import Replica, ReplicaRole, SimulatedFrontend, draw_ids
from simulator.roles import COPY_SHARE, SimulatedExchange
from simulator.trace import TraceRequest

# Samples of pages and queues over time; their interval grows with the run.
MAX_SAMPLES = 1024


class Sent(msgspec.Struct, frozen=True, array_like=True):
    """A request on its way, with the tokens `head` that it continues."""

    index: int
    request: TraceRequest
    head: "array[int]"


class World:
    """Clients and replicas, each with `num_pages` KV pages.

    `load_balance_method` chooses the replica of a request, with the router of the frontend. There
    are `replicas` at first, and `max_replicas`, if given, at most. `on_end` is called once for each
    request that has ended. With `ask_after_s`, the estimated wait of each request that is queued so
    many seconds after its arrival is recorded. The first `prefill_replicas` compute prompts for the
    others, or as many as the load asks for. A page is copied in `copy_share` of the time in which
    it is computed.
    """

    def __init__(
        self,
        config: server_config.ServerConfig,
        model: cost_model.CostModel,
        num_pages: int,
        replicas: int = 1,
        load_balance_method: str = engine_args.IN_TURN,
        seed: int = 0,
        on_end: Callable[[], object] = lambda: None,
        ask_after_s: float | None = None,
        max_replicas: int | None = None,
        prefill_replicas: engine_args.CountOrAuto = 0,
        copy_share: float = COPY_SHARE,
    ) -> None:
        self.records = records.Records()
        self.samples: list[records.RecordSample] = []
        self._sample_interval = 0.01
        self._next_sample_at = 0.0
        self._clock = clock = Clock()
        self._frontend = SimulatedFrontend(config, model)
        self._message_delay = model.delays_ms.message_in / latency.MS
        self._delivery_delay = model.delays_ms.delivery / latency.MS
        self._seed = seed
        self._on_end = on_end
        self._ask_after_s = ask_after_s
        self._arrivals: Iterator[tuple[int, TraceRequest]] = iter(())
        self._followers: dict[int, list[Sent]] = {}
        self._continued: dict[int, array[int]] = {}
        num_numbers = max_replicas or replicas
        self.dispatcher: Dispatcher | None = None
        if num_numbers > 1:
            self.dispatcher = Dispatcher(config, load_balance_method, num_numbers, prefill_replicas)
        num_exporting = prefill_replicas if isinstance(prefill_replicas, int) else num_numbers - 1
        exchange = (
            SimulatedExchange(model, config.worker.page_size, copy_share)
            if prefill_replicas
            else None
        )

        def make_replica(number: int, fleet: Fleet) -> Replica:
            return Replica(
                config, model, num_pages, clock, self.records.take_tokens, self._close,
                number, fleet if num_numbers > 1 else None,
                ReplicaRole(exchange, number < num_exporting),
            )  # fmt: skip

        self.fleet = Fleet(
            replicas, make_replica, self.dispatcher, self.records, clock, self._delivery_delay,
            self._frontend.vocab_size,
        )  # fmt: skip

    @property
    def replicas(self) -> list[Replica]:
        """The replicas that are there."""
        return self.fleet.serving

    def lose(self, loss: Loss, return_after_s: float | None) -> None:
        """Lose replicas at a time, and let them come back some seconds later, if at all."""
        self._clock.at(START + loss.at, partial(self._lose, return_after_s), loss.count)

    def _lose(self, return_after_s: float | None, count: int) -> None:
        numbers = self.fleet.serving_numbers[-count:]
        self.fleet.lose(numbers)
        if return_after_s is not None:
            for number in numbers:
                self._clock.at(self._clock.now + return_after_s, self.fleet.add, number)

    def run(self, arrivals: Iterable[tuple[int, TraceRequest]]) -> None:
        """Run until every request of `arrivals`, with their indexes, has ended.

        They are sorted by time; a request that follows another comes before any later request.
        """
        self._arrivals = iter(arrivals)
        self._next_arrival()
        while self._clock.advance():
            if self._clock.now >= self._next_sample_at:
                self._sample()

    def _next_arrival(self) -> None:
        for index, request in self._arrivals:
            sent = Sent(index, request, array("i"))
            if request.follows is None:
                self._clock.at(START + request.at, self._arrive, sent)
                return
            self._followers.setdefault(request.follows, []).append(sent)

    def _arrive(self, sent: Sent) -> None:
        self._next_arrival()
        self._submit(sent)

    def _submit(self, sent: Sent) -> None:
        index, request = sent.index, sent.request
        ids = sent.head + trace.prompt_ids(request, self._frontend.vocab_size, self._seed)
        now = self._clock.now
        self.records.add(index, now, now + self._message_delay)
        try:
            message = self._frontend.submit(index, request, ids, now, now + self._message_delay)
        except QuadrigaError as error:
            self._fail(index, error.code)
            return
        if any(follower.request.continues for follower in self._followers.get(index, ())):
            self._continued[index] = ids
        replica = self.fleet.send(message)
        if self._ask_after_s is not None and replica is not None:
            question = to_scheduler.ProgressRequest(message.client, "", [message.request_id])
            asked_at = message.tokenized_at + self._ask_after_s
            self._clock.at(asked_at, partial(self._ask, replica), question)

    def _ask(self, replica: Replica, question: to_scheduler.ProgressRequest) -> None:
        """Record the estimated wait of a request that is queued."""
        (value,) = replica.scheduler.progress.values(question, self._clock.now)
        if value.state is client.RequestState.QUEUED:
            index = int(question.request_ids[0])
            self.records.expected_waits[index] = records.ExpectedWait(self._clock.now, value.wait_s)

    def _fail(self, index: int, code: str) -> None:
        now = self._clock.now
        self.records.fail(index, code, now)
        self._ended(index, now)

    def _close(self, closed: to_detok.StreamEnd, when: float) -> None:
        """Record the terminal message of a request."""
        index, delivered = int(closed.request_id), when + self._delivery_delay
        self.records.end(index, closed, delivered)
        self.fleet.end(closed.request_id)
        self._ended(index, delivered)

    def _ended(self, index: int, delivered: float) -> None:
        """Send the requests that follow this one. A chat does not continue after a failed turn."""
        self._on_end()
        prompt = self._continued.pop(index, array("i"))
        for sent in self._followers.pop(index, ()):
            if sent.request.continues:
                if index in self.records.errors:
                    self.records.add(sent.index, delivered, delivered)
                    self._fail(sent.index, "not_sent")
                    continue
                generated = int(self.records["completion_tokens"][index])
                first = int(self.records["prompt_tokens"][index])
                positions = np.arange(first, first + generated)
                tokens = draw_ids(np.array([index]), positions, self._frontend.vocab_size)
                sent = Sent(sent.index, sent.request, prompt + array("i", tokens.tolist()))
            self._clock.at(delivered + sent.request.at, self._submit, sent)

    def _sample(self) -> None:
        pools = [replica.load for replica in self.replicas]
        uneven_rows, uneven_queues = self.fleet.imbalance([pool.running for pool in pools])
        sample = records.RecordSample(
            time=self._clock.now,
            running=sum(pool.running for pool in pools),
            waiting=sum(pool.waiting for pool in pools),
            pages_held=sum(pool.pages_held for pool in pools),
            pages_cached=sum(pool.pages_cached for pool in pools),
            replicas=len(pools),
            uneven_rows=uneven_rows,
            uneven_queues=uneven_queues,
        )
        self.samples.append(sample)
        if len(self.samples) > MAX_SAMPLES:
            del self.samples[1::2]
            self._sample_interval *= 2
        self._next_sample_at = self._clock.now + self._sample_interval
