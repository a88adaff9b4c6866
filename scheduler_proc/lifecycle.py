"""The life of a request: accepted, queued, ended once, and published as it goes.

`refusal` has the limits on new requests, `RequestLifecycle` everything else.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from quadriga.errors import InvalidRequest, QuadrigaError, QueueFull, RequestFailed, ServerStopping
from quadriga.server.config.engine_args import SchedulerArgs
from quadriga.wire import client, sockets, to_detok, to_scheduler
from quadriga.wire.adapter import AdapterRef
from quadriga.wire.to_detok import PromptWork
from quadriga.wire.worker import AdapterReady, GrammarReady, WorkerReady
from scheduler_proc import core, forecast, held_requests, request_table
from scheduler_proc.journal import detok_outbox, recovery, writer
from scheduler_proc.journal.events import StepEvents
from scheduler_proc.observe import replica_report, stats, tracer
from scheduler_proc.planning import quarantine, step_cost
from scheduler_proc.state import batch, kv_offload, pins
from scheduler_proc.state.kv_cache import KVCache
from scheduler_proc.state.request import FinishReason, Request, RequestFailure, WaitReason

# Limits on new requests. The frontend checks them, too, as far as it knows their state.

RETRY_AFTER_S = 1.0


def refusal(
    args: SchedulerArgs, is_draining: bool, num_waiting: int, num_choices: int, num_open: int
) -> QuadrigaError | None:
    """Return why a new request is refused; None where it is accepted.

    Args:
        args: the limits.
        is_draining: the server stops.
        num_waiting: number of requests without a slot.
        num_choices: number of choices of the new request.
        num_open: number of other open requests of its client.
    """
    if is_draining:
        return ServerStopping("the server is stopping and takes no new requests")
    if num_waiting + num_choices > args.max_queued_requests:
        return QueueFull.of_waiting(num_waiting, args.max_queued_requests, RETRY_AFTER_S)
    limit = args.max_requests_per_client
    if limit is not None and num_open >= limit:
        return QueueFull.of_client(num_open, limit, RETRY_AFTER_S)
    return None


# The life of a request: accepted, queued, ended once, and published as it goes.
#
# Nothing here knows steps or worker times: `Scheduler` runs the steps and hands over what they
# bring. What happens between two publications is gathered in one record (`StepEvents`), which feeds
# detokenizer and journal.


class EndObserver(Protocol):
    """Is called at the end of each request."""

    def on_finish(self, request: Request, now: float) -> None:
        """Take in that a request has ended. now: Unix time in seconds."""


class PoolObserver(Protocol):
    """Publishes what happens in the KV pool."""

    def watch(self, kv: KVCache) -> None:
        """Begin with a new, empty pool."""

    def publish(self) -> None:
        """Publish what has happened since the last call."""


class RequestLifecycle:
    """Accept, queue and end requests, and publish what happened.

    Attributes:
        core: the waiting queue, the running batch and the KV pages.
        table: every request that has not ended.
        outbox: the ends that the frontend has not acknowledged, and replays.
        stats: the counters of requests and steps.
        offload_stats: those of the KV pages beyond the pool, if there are any.
        pin_stats: those of the cached pages that are kept for a time.
        recent_ends: what the last requests say about the lengths of others.
        grammars: the requests whose grammar the worker compiles.
        adapters: the adapters that it has, and the requests that wait for one.
        events: what happened since the last publication.
        pool_observers: publish the events of the KV pool, where a flag asks for them.
        end_observers: logs, and the live feed while a client watches.
        report: what the frontend has to know of this replica beside the texts.
        queue_wait_s: estimated seconds that one more request would wait; None while the queue is
            far from full, or where nothing is known.
        tracer: records the spans of traced requests.
    """

    def __init__(
        self,
        args: SchedulerArgs,
        eos_ids: frozenset[int],
        worker: sockets.Sender,
        detok: sockets.Sender,
        clock: Callable[[], float],
        journal: writer.Journal,
        costs: step_cost.StepCosts,
    ) -> None:
        self._args = args
        self._costs = costs
        self._detok = detok
        self._clock = clock
        self._journal = journal
        self.tracer = tracer.Tracer(clock)
        self.end_observers: list[EndObserver] = []
        self.pool_observers: list[PoolObserver] = []
        self.report = replica_report.ReplicaReport()
        self.grammars = held_requests.GrammarQueue(worker)
        self.adapters = held_requests.AdapterQueue(worker, args.max_loras, args.num_loras_in_memory)
        self.table = request_table.RequestTable(eos_ids)
        self.outbox = detok_outbox.DetokOutbox(detok)
        self.stats = stats.SchedulerStats()
        self.offload_stats = kv_offload.OffloadStats()
        self.pin_stats = pins.PinStats()
        self.core = core.SchedulerCore(
            args, batch.Capacity(), costs, 0, self.offload_stats, self.pin_stats
        )
        self.recent_ends = forecast.RecentEnds()
        self.events = StepEvents()
        self.queue_wait_s: float | None = None
        self._is_draining = False
        self._reported_drained = False
        self._recalls: list[int] = []  # that wait for replays

    def restore(self, recovered: Iterable[recovery.RecoveredRequest], first_seq: int) -> None:
        """Take over the requests of a journal. No new request gets a number below `first_seq`."""
        self.table.start_numbering_at(first_seq)
        for choice in recovered:
            request = self.table.restore(choice)
            self._journal.keep(choice.message, [request], choice.acknowledged, choice.kernels)
            self.tracer.on_restored(request, choice.last_token_at)
            if request.finished:
                self.outbox.finish(request)
                if choice.acknowledged:
                    self.outbox.acknowledge({request.seq: request.placement})
        self._journal.compact()

    @property
    def num_waiting(self) -> int:
        """Number of requests without a slot, also those that wait for the worker's preparation."""
        if self.core.kv.num_pages == 0:
            return len(self.table)
        return self.core.num_waiting + self.grammars.num_waiting + self.adapters.num_waiting

    # --- accept and queue -------------------------------------------------------------------------

    def submit(self, message: to_scheduler.Submit) -> None:
        """Accept a request, or its choices that are not known. A refused one ends at once."""
        self.withdraw(self._superseded(message))
        missing = self._missing(message)
        if not missing:
            return
        # An end that no client gets again is not replayed beside the choice that begins again: the
        # frontend and the client find what is of a choice by its name and index.
        self._withdraw([], self.outbox.ended_of(message, missing))
        num_waiting, num_open = self.num_waiting, self.table.num_ids_of(message.client)
        if len(missing) < message.params.n:
            message = message.of_choices(missing)
        requests = self.table.add(message)
        self.events.accepted.append((message, requests))
        if message.trace is not None:
            self.tracer.on_submit(requests, num_waiting, bool(message.progress))
        if message.client_retry or message.frontend_retry:
            # The client may have tokens from a scheduler that died before it wrote them down.
            self._replay(requests, [])
            for request in [request for request in requests if request.finished]:
                requests.remove(request)
                self.close(request)
                self.publish(to_detok=False)  # the replay has the end
        error = None
        if not message.frontend_retry:
            num_choices = len(requests)
            error = refusal(self._args, self._is_draining, num_waiting, num_choices, num_open)
            if error is None and requests:
                error = forecast.refuse_target(
                    self.core, self.recent_ends, requests[0], self._clock()
                )
        for request in requests:
            if error is not None:
                self.fail(request, error)
            else:
                self._enqueue(request)

    def _missing(self, message: to_scheduler.Submit) -> list[int]:
        """Return the indexes of the choices that were not accepted before.

        A client that retries the request gets a replay of the others. Some are missing where the
        others had ended when the client was lost, or on a replica that is lost.
        """
        indexes, names_choices = message.indexes, bool(message.progress)
        is_retry = message.client_retry or message.frontend_retry
        live = [r for r in self._live(message) if r.index in indexes]
        ended = self.outbox.ended_choices(message, message.client_retry) if is_retry else {}
        ended = {index: seq for index, seq in ended.items() if index in indexes}
        for request in live:
            request.placement = message.placement
        self.outbox.place_again(ended.values(), message.placement)
        if message.client_retry:
            self._replay(live, list(ended.values()))
        known = ended.keys() | {request.index for request in live}
        if known and not names_choices and not message.client_retry:
            return []  # the other choices have ended, and are not kept any more
        return [index for index in indexes if index not in known]

    def _live(self, message: to_scheduler.Submit) -> list[Request]:
        """Return the open choices of a request."""
        return self.table.of_client(message.client, message.request_id)

    def _superseded(self, message: to_scheduler.Submit) -> list[Request]:
        """Return the open choices of an earlier stay here that a later one brings again."""
        return [
            request
            for request in self._live(message)
            if request.index in message.indexes and request.placement < message.since
        ]

    def _enqueue(self, request: Request) -> None:
        """Queue a request, at once or when the worker has compiled its grammar."""
        if request.grammar is None or not self.grammars.add(request):
            self._enqueue_compiled(request)
        else:
            self.tracer.on_grammar(request, "waits")

    def on_grammar_ready(self, ready: GrammarReady) -> None:
        """Queue or fail the requests that have waited for a grammar."""
        for request in self.grammars.on_ready(ready):
            if ready.error:
                self.fail(request, RequestFailed(ready.error))
            else:
                request.waited_for = (WaitReason.GRAMMAR,)
                self.tracer.on_grammar(request, "compiled")
                self._enqueue_compiled(request)

    def _enqueue_compiled(self, request: Request) -> None:
        """Queue a request, at once or when the worker has loaded its adapter."""
        if request.adapter is None:
            self._add_to_core(request)
            return
        if self.adapters.add(request):
            self.tracer.on_adapter(request, "waits")
        else:
            self._add_to_core(request)
        self._settle_adapters()

    def on_adapter_ready(self, ready: AdapterReady) -> None:
        """Queue or fail the requests that have waited for an adapter."""
        for request in self.adapters.on_ready(ready):
            if ready.error:
                self.fail(request, InvalidRequest(ready.error, "adapter"))
            else:
                self._on_adapter(request)
        self._settle_adapters()

    def drop_adapters(self, ids: list[str]) -> None:
        """Free the memory of adapters that have no name any more."""
        self.adapters.drop(ids)
        self._settle_adapters()

    def pin_adapters(self, adapters: list[AdapterRef]) -> None:
        """Let these adapters, and no others, keep their places in the worker."""
        self.adapters.pin(adapters)
        self._settle_adapters()

    def _on_adapter(self, request: Request) -> None:
        """Queue a request whose adapter is loaded."""
        request.waited_for += (WaitReason.ADAPTER,)
        self.tracer.on_adapter(request, "loaded")
        self._add_to_core(request)

    def _settle_adapters(self) -> None:
        """Move requests between the core and those that wait for their adapter's turn."""
        leaving, entering = self.adapters.settle()
        for request in leaving:
            self.core.remove(request)
        for request in entering:
            self._on_adapter(request)

    def _add_to_core(self, request: Request) -> None:
        """Queue a request that waits for nothing else; fail one that can never run."""
        failure = self.core.add(request)
        if failure is not None:
            self.fail(*failure)
        else:
            self.core.offload.load_at_once(request)

    def restart_all(self, ready: WorkerReady, poison: Request | None) -> None:
        """Queue every request again for a new worker, but end the one that kills workers."""
        logging.debug(
            "worker process %d is ready: %d pages of %d tokens; %d requests are open",
            ready.pid, ready.num_pages, ready.page_size, len(self.table),
        )  # fmt: skip
        tiers = kv_offload.TierFacts(ready.stored, ready.fetches, ready.page_bytes)
        capacity = batch.Capacity(
            ready.num_pages, ready.page_size, ready.prefill_tokens, ready.window,
            ready.can_guess, ready.draft_costs, tiers, ready.is_encoder,
        )  # fmt: skip
        if ready.can_guess and self.stats.guesses is None:
            self.stats.guesses = stats.GuessStats(self._args.num_speculative_tokens)
        self.grammars.forget_all()
        self.adapters.begin(ready.session)
        num_retractions = self.core.num_retractions
        self._costs.on_new_worker()
        self.core = core.SchedulerCore(
            self._args, capacity, self._costs, num_retractions, self.offload_stats, self.pin_stats
        )
        self.report.watch(self.core.kv)
        for observer in self.pool_observers:
            observer.watch(self.core.kv)
        for request in self.table:
            request.reset_for_new_worker()
        if poison is not None:
            self.fail(poison, quarantine.poison_error(poison))
        for request in self.table:
            self._enqueue(request)

    # --- end: the one way out ---------------------------------------------------------------------

    def finish(
        self, request: Request, reason: FinishReason, error: client.ErrorInfo | None = None
    ) -> None:
        """End a request, wherever it stands, with one terminal message, for the first reason."""
        if not request.finished:
            self.core.remove(request)
            request.finish(reason, error=error)
            self.close(request)

    def fail(self, request: Request, error: QuadrigaError) -> None:
        """End a request with an error."""
        self.finish(request, FinishReason.ERROR, client.ErrorInfo.of(error))

    def fail_all(self, failures: Iterable[RequestFailure]) -> None:
        """End requests with their errors."""
        for request, error in failures:
            self.fail(request, error)

    def abort(self, request: Request, by: str, error: client.ErrorInfo | None = None) -> None:
        """End a request that `by` (CLIENT, CLIENT_LOST, SERVER_STOPPING) gives up."""
        self.stats.aborts[by] += 1
        if by == to_scheduler.CLIENT_LOST:
            error = client.ErrorInfo(by, "the connection of its client was lost")
        self.finish(request, FinishReason.ABORT, error)

    def abort_all(self, reason: str) -> None:
        """End every request because the server stops."""
        for request in self.table:
            error = client.ErrorInfo("server_stopping", reason)
            self.abort(request, to_scheduler.SERVER_STOPPING, error)

    def close(self, request: Request) -> None:
        """Report the end of a request that the core has removed."""
        now = self._clock()
        self.stats.on_finish(request, now)
        if request.admitted_at:
            self.recent_ends.on_end(request)
        if request.trace is not None:
            self.tracer.on_finish(request, now)
        for observer in self.end_observers:
            observer.on_finish(request, now)
        self.events.finished.append(request)
        self.outbox.finish(request)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        """Remove a request that has ended, or is gone, from all but the core."""
        self.grammars.remove(request)
        if request.adapter is not None:
            self.adapters.remove(request)
            self._settle_adapters()
        self.table.remove(request)

    def hand_back(self, number: int) -> None:
        """Give every request back to the frontend, for another replica.

        Each is gone from here without an end; its tokens so far have been sent. In the journal it
        has ended, so that it is not resumed here.

        Args:
            number: of the recall.
        """
        self._recalls.append(number)
        if not self.outbox.has_replays:
            self.continue_replays()

    def _hand_back(self, number: int) -> None:
        self._detok.send(to_detok.HandedBack(number, self._give_up(list(self.table))))

    def withdraw(self, requests: list[Request]) -> None:
        """Drop choices that another replica owns. Each is gone from here without an end."""
        self._withdraw(requests, [])

    def _withdraw(self, live: list[Request], ended: list[int]) -> None:
        if live or ended:
            self._detok.send(to_detok.Withdrawn(self._give_up(live, ended)))

    def _give_up(self, requests: list[Request], ended: Iterable[int] = ()) -> list[int]:
        """Drop requests without an end, and ends that are of no use. Return their numbers.

        It is journaled at once: another replica may have them as soon as that is known.
        """
        self.publish()
        seqs = [*(request.seq for request in requests), *ended]
        self.outbox.forget(seqs)
        for request in requests:
            self.core.remove(request)
            request.finish(FinishReason.ABORT)
            self._forget(request)
        self.events.finished += requests
        self.events.acknowledged += seqs
        self.publish(to_detok=False)
        self._journal.commit()
        return seqs

    # --- publish and replay -----------------------------------------------------------------------

    def publish(self, to_detok: bool = True) -> None:
        """Hand the record of what happened to detokenizer and journal, and begin a new one."""
        events, report = self.events, self.report
        core = self.core
        has_news = report.is_due(core.running, core.offload, core.kv.page_size)
        has_report = to_detok and (has_news or events.has_output)
        if events.is_empty and to_detok and not has_report:
            return
        was_sent = events.has_output or not to_detok
        # A step without tokens, as of a chunk, leaves its time to the next message.
        self.events = StepEvents(time=0.0 if was_sent else events.time)
        if to_detok:
            news = None
            if has_report:
                costs, page_s = self._costs, self.offload_stats.fetch_page_s
                work = PromptWork(
                    costs.prompt_s, costs.num_prompt_tokens, page_s,
                    costs.num_rows, costs.rows_s, costs.shortest_s,
                )  # fmt: skip
                news = report.take(self.core.kv, self.table, self.outbox.replayable(), work)
            self.outbox.send(events, self._clock(), self.num_waiting, self.queue_wait_s, news)
        self._journal.append(events)

    def _replay(self, live: Iterable[Request], ended: list[int]) -> None:
        """Send the whole streams of live requests, and of ended ones by their numbers."""
        self.publish()
        self._publish_replays(self.outbox.ask_replays(live, ended))

    def _publish_replays(self, replays: list[to_detok.StreamReplay]) -> None:
        """Send replays, whose tokens have the time of the message: no step has made them."""
        self.events.replayed, self.events.time = replays, 0.0
        self.publish()

    def continue_replays(self) -> bool:
        """Send more of the replays that are due. Return whether some are left."""
        if self.outbox.has_replays:
            self.publish()
            self._publish_replays(self.outbox.next_replays())
        if not self.outbox.has_replays:
            recalls, self._recalls = self._recalls, []
            for number in recalls:
                self._hand_back(number)
        return self.outbox.has_replays

    def replay_to_detok(self, session: int) -> None:
        """Give a new detokenizer every live stream, and every end that was not acknowledged."""
        self.tracer.note("detokenizer ready")
        self.publish(to_detok=False)  # the replay has it
        self.outbox.on_detok_restarted(session)
        self.report.restate()
        self._reported_drained = False
        self._replay(list(self.table), self.outbox.seqs_to_replay)

    def replay_to_frontend(self, sender: int) -> None:
        """Send a new frontend every end that was not acknowledged. sender: its number."""
        self.tracer.note("frontend ready")
        self.publish()
        self.report.frontend = sender
        self.report.restate()
        # It has dropped what came before it knew this replica, also of its own requests.
        live = [request for request in self.table if request.placement > sender > 0]
        self._replay(live, self.outbox.seqs_to_replay)

    def name_requests(self) -> None:
        """Send a new frontend the names of the requests that are known here."""
        adapters: dict[tuple[bytes, str], AdapterRef | None] = {}
        adapters |= {(r.client, r.request_id): None for r in self.outbox.replayable()}
        adapters |= {(r.client, r.request_id): r.adapter for r in self.table}
        known = [to_detok.KnownRequest(*name, adapters[name]) for name in sorted(adapters)]
        self._detok.send(to_detok.KnownRequests(known))

    def acknowledge(self, message: to_scheduler.EndsDelivered) -> None:
        """Take in that clients have the ends of requests, unless these are sent once more."""
        if message.session == self.outbox.session:
            self.events.acknowledged += self.outbox.acknowledge(message.placements)

    # --- drain ------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Refuse new requests from now on, and report when the last one has ended."""
        logging.debug("draining: %d requests are open", len(self.table))
        self._is_draining = True
        self._reported_drained = False

    def report_drained(self) -> None:
        """Report once that every request has ended and every end was acknowledged."""
        is_empty = not self.table and self.outbox.all_acknowledged
        if self._is_draining and is_empty and not self._reported_drained:
            self._reported_drained = True
            self._detok.send(to_detok.Drained())
