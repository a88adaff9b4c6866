"""A further rank of a worker: runs the same steps as rank 0, and sends no results.

Rank 0 starts the ranks of its machine (distributed/leader.py), as
`python -m worker_proc.tp_rank RANK MEETING --run-dir …`. A rank crew (cluster_proc/crew.py) starts
those of another machine, without MEETING, and again after each end, so that they wait for the next
rank 0.
"""

import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from quadriga.errors import ConfigError
from quadriga.server.models.resolve import resolve_model
from quadriga.server.processes.child import Child, run_child
from quadriga.server.processes.control_channel import EXIT_LAUNCHER_DIED, EXIT_OK
from quadriga.server.processes.machine import other_version
from quadriga.wire.links import PeerWatch
from quadriga.wire.sockets import Inbox, Outbox
from quadriga.wire.worker import JoinRanks, RankMessage, StopWorker, WorkerMessage
from worker_proc.distributed.rendezvous import PortRendezvous, Rendezvous, rendezvous_at
from worker_proc.sampling.grammar_compiler import GrammarCompiler


def main() -> None:
    """Run the process until StopWorker, or until rank 0 exits."""
    rank, meeting = int(sys.argv[1]), sys.argv[2]
    del sys.argv[1]
    body = partial(wait_for_rank_0, rank=rank)
    if not meeting.startswith("--"):
        del sys.argv[1]
        threading.Thread(target=_exit_with_rank_0, daemon=True).start()
        body = partial(serve_here, rank=rank, meeting=rendezvous_at(meeting))
    run_child(f"worker_proc rank {rank}", body)


def serve_here(child: Child, rank: int, meeting: Rendezvous) -> None:
    """Load this rank's part of the model, then handle what a rank 0 of this machine relays."""
    serve_rank(child, rank, Inbox(child.endpoints.rank(rank), WorkerMessage), meeting)


def wait_for_rank_0(child: Child, rank: int) -> None:
    """Wait for a rank 0 on another machine, load this rank's part, then handle what it relays.

    Raises:
        ConfigError: rank 0 runs another version of quadriga.
    """
    links = child.endpoints.links
    inbox: Inbox[RankMessage] = Inbox(links.rank(rank), RankMessage, links.prepare_bind)
    while not isinstance(join := inbox.receive(), JoinRanks):
        pass  # of a rank 0 that ended before this process began
    if refusal := other_version(f"rank 0 at {join.lifeline}", join.version):
        raise ConfigError(refusal)
    lifeline = Outbox(join.lifeline, links.prepare_connect)
    watch = PeerWatch(lifeline.socket, lambda: os._exit(EXIT_OK))
    serve_rank(child, rank, inbox, PortRendezvous(join.meeting, links.host), child.ready)
    watch.close()


def serve_rank(
    child: Child,
    rank: int,
    inbox: "Inbox[Any]",
    meeting: Rendezvous,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Load a rank's part of the model, then handle the messages of rank 0, until StopWorker.

    Args:
        child: this process.
        rank: its number.
        inbox: where it receives what rank 0 relays.
        meeting: how it finds the other ranks.
        on_ready: called when the model is loaded.
    """
    from torch import inference_mode

    from worker_proc.loading.sharding import TPRank
    from worker_proc.rank import Rank
    from worker_proc.startup.adapters import make_loader
    from worker_proc.startup.build import make_runner
    from worker_proc.startup.devices import take_cores

    take_cores(child.config.worker, child.replica)
    files = resolve_model(child.config.model)
    part = TPRank(rank, child.config.worker.tp)
    runner = make_runner(
        child.config, files, part, meeting,
        replica=child.replica, run_dir=child.endpoints.run_dir,
    )  # fmt: skip
    runner.warm_up()
    grammars = GrammarCompiler(files, child.endpoints.results)
    runner.table.sampling.compiled = grammars.compiled
    adapters = make_loader(child, files, runner, answers=False)
    handle = Rank(runner, grammars, grammars.compile_here, adapters, send=lambda _: None).handle
    on_ready()
    with inference_mode():
        while not isinstance(message := inbox.receive(), StopWorker):
            handle(message)


def _exit_with_rank_0() -> None:
    sys.stdin.buffer.read()
    os._exit(EXIT_LAUNCHER_DIED)


if __name__ == "__main__":
    main()
