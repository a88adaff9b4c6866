"""What the scheduler says of itself: gauges and counters, as docs/protocol.md lists them."""

import os

from quadriga.config.scheduler_args import SchedulerArgs
from quadriga.wire.messages.public import Info, InfoValues
from quadriga.wire.messages.to_detok import InfoReply
from quadriga.wire.messages.to_scheduler import InfoRequest
from quadriga.wire.messages.worker import WorkerReady
from scheduler_proc.durability.journal import Journal, NoJournal
from scheduler_proc.grammar_queue import GrammarQueue
from scheduler_proc.intake import Intake
from scheduler_proc.observe.stats import SchedulerStats
from scheduler_proc.planning.planner import Planner
from scheduler_proc.request_table import RequestTable


class ServerInfoCollector:
    """Asks everybody who knows something. worker: None until it is there."""

    def __init__(
        self,
        args: SchedulerArgs,
        requests: RequestTable,
        grammars: GrammarQueue,
        arrivals: Intake,
        statistics: SchedulerStats,
        journal: Journal | NoJournal,
    ) -> None:
        self._args = args
        self._requests = requests
        self._grammars = grammars
        self._arrivals = arrivals
        self._statistics = statistics
        self._journal = journal
        self.worker: WorkerReady | None = None

    def answer(self, message: InfoRequest) -> InfoReply:
        """The Info that a client asked for, on its way back; the cache is flushed before, if the
        client wants that."""
        flushed = {"flushed_pages": self._flush_cache()} if message.flush_cache else {}
        values = message.values | flushed | self.info()
        pids = message.values.get("pids")
        if isinstance(pids, dict):
            worker = self.worker.pid if self.worker else 0
            values["pids"] = pids | {"scheduler_proc": os.getpid(), "worker_proc": worker}
        return InfoReply(message.client, Info(message.request_id, values))

    def _flush_cache(self) -> int:
        """Forget the cached prefixes that nobody uses; their pages."""
        planner = self._arrivals.planner
        return 0 if planner is None else planner.admission.kv.flush()

    def info(self) -> InfoValues:
        """The scheduler's own part of an Info."""
        waiting = self._arrivals.num_waiting
        return {
            "running": len(self._requests) - waiting,
            "waiting": waiting,
            "waiting_for_grammar": self._grammars.num_waiting,
            "journal": self._journal.state,
            **_worker_info(self.worker),
            **_policy_info(self._args, self.worker),
            **_pool_info(self._arrivals.planner),
            **self._statistics.info(),
        }


def _worker_info(ready: WorkerReady | None) -> InfoValues:
    """What the worker came out as."""
    return {
        "ready": ready is not None,
        "dtype": ready.dtype if ready else None,
        "device": ready.device if ready else None,
        "attention_backend": ready.backend if ready else None,
    }


def _policy_info(args: SchedulerArgs, ready: WorkerReady | None) -> InfoValues:
    """How steps are composed."""
    return {
        "batch_mode": args.mode,
        "batching": args.batching,
        "schedule_policy": args.schedule_policy,
        "fair_clients": args.fair_clients,
        "prefix_cache": not args.disable_radix_cache,
        "chunked_prefill_size": args.chunk_size(ready.prefill_tokens) if ready else None,
    }


def _pool_info(planner: Planner | None) -> InfoValues:
    """Pages, and how admission stands. Empty before the worker has said how many there are."""
    if planner is None:
        return {}
    kv, admission = planner.admission.kv, planner.admission
    return {
        "page_size": kv.page_size,
        "pages_total": kv.num_pages,
        "pages_free": kv.num_free,
        "pages_cached": kv.num_cached,
        "pages_held": kv.num_held,
        "retractions": planner.giving_way.retractions,
        "new_token_ratio": admission.ratio.value,
    }
