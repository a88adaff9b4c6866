"""Gauges of the scheduler for the server info, as docs/protocol.md lists them."""

import os

from quadriga.config.scheduler_args import SchedulerArgs
from quadriga.wire.messages.to_client import Info, InfoValues
from quadriga.wire.messages.to_detok import InfoReply
from quadriga.wire.messages.to_scheduler import InfoRequest
from quadriga.wire.messages.worker import WorkerReady
from scheduler_proc.core import SchedulerCore


def collect_info(args: SchedulerArgs, ready: WorkerReady | None, core: SchedulerCore) -> InfoValues:
    """Return the gauges of worker, policy and pool. ready: None before the worker is."""
    values: InfoValues = {
        "ready": ready is not None,
        "dtype": ready.dtype if ready else None,
        "device": ready.device if ready else None,
        "attention_backend": ready.backend if ready else None,
        "kernels": ready.kernels if ready else None,
        "cuda_graph": ready.cuda_graph if ready else None,
        "batch_mode": args.mode,
        "batching": args.batching,
        "schedule_policy": args.schedule_policy,
        "fair_clients": args.fair_clients,
        "prefix_cache": not args.disable_radix_cache,
        "chunked_prefill_size": args.chunk_size(ready.prefill_tokens) if ready else None,
    }
    if args.fair_tenants:
        values["fair_tenants"] = True
    if ready is not None:
        values |= {
            "page_size": core.kv.page_size,
            "pages_total": core.kv.num_pages,
            "pages_free": core.kv.num_free,
            "pages_cached": core.kv.num_cached,
            "pages_held": core.kv.num_held,
            "retractions": core.num_retractions,
            "new_token_ratio": core.admission.ratio.value,
        }
    return values


def info_reply(message: InfoRequest, values: InfoValues, ready: WorkerReady | None) -> InfoReply:
    """Return the Info that a client asked for: what the frontend knows, and `values`."""
    values = message.values | values
    pids = message.values.get("pids")
    if isinstance(pids, dict):
        worker = ready.pid if ready else 0
        values["pids"] = pids | {"scheduler_proc": os.getpid(), "worker_proc": worker}
    return InfoReply(message.client, Info(message.request_id, values))
