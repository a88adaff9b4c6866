"""What the parts of the core work on: where each request stands, and which pages it holds."""

from quadriga.config.scheduler_args import SchedulerArgs
from scheduler_proc.kv_offload.kv_offload import NoOffload
from scheduler_proc.planning.admission import Admission
from scheduler_proc.planning.quarantine import Quarantine, is_quarantined
from scheduler_proc.policies import make_queue, make_turns
from scheduler_proc.state.batch import RunningBatch
from scheduler_proc.state.kv_cache import KVCache
from scheduler_proc.state.request import Request


class CoreState:
    """Requests and pages.

    A request stands in `waiting` or `quarantine` until it has a slot, then in `running` as long as
    it needs steps. A quarantined one is in `quarantine` all the time.

    Args:
        args: the scheduler's flags.
        kv: the pages, none of which is held yet.
        offload: what is beyond them.

    Attributes:
        kv: the pages.
        offload: the pages beyond the pool.
        admission: the slots, and which requests hold slot and pages.
        waiting: the requests that wait, in the order of the policy.
        quarantine: the requests that run alone.
        running: the requests that decode, and those whose prompts are partly computed.
    """

    def __init__(self, args: SchedulerArgs, kv: KVCache, offload: NoOffload) -> None:
        self.kv = kv
        self.offload = offload
        self.admission = Admission(args, kv)
        self.waiting = make_queue(args, kv.match_prefix, kv.page_size)
        self.quarantine = Quarantine()
        self.running = RunningBatch(
            args.max_batch_size, args.batch_concurrency_beside, make_turns(args)
        )

    def queue(self, request: Request) -> None:
        """Let a request without a slot wait."""
        (self.quarantine if is_quarantined(request) else self.waiting).push(request)
