"""A further rank of a worker: runs the same steps as rank 0, and sends no results.

Rank 0 starts it (see tp_leader.py) as
`python -m worker_proc.distributed.tp_rank RANK STORE --run-dir …`.
"""

import os
import sys
import threading
from pathlib import Path

from quadriga.model_files.resolve import resolve_model
from quadriga.runtime.child import Child, run_child
from quadriga.runtime.exit_codes import EXIT_LAUNCHER_DIED
from quadriga.wire.messages.worker import StopWorker, WorkerMessage
from quadriga.wire.sockets import Inbox
from worker_proc.sampling.grammar_compiler import GrammarCompiler


def main() -> None:
    """Run the process until StopWorker, or until rank 0 exits."""
    rank, store = int(sys.argv[1]), Path(sys.argv[2])
    del sys.argv[1:3]
    threading.Thread(target=_exit_with_rank_0, daemon=True).start()
    run_child(f"worker_proc rank {rank}", lambda child: body(child, rank, store))


def body(child: Child, rank: int, store: Path) -> None:
    """Load this rank's part of the model, then handle what rank 0 relays."""
    inbox: Inbox[WorkerMessage] = Inbox(child.endpoints.rank(rank), WorkerMessage)
    from torch import inference_mode

    from worker_proc.loading.sharding import TPRank
    from worker_proc.rank import Rank
    from worker_proc.startup.build import make_runner
    from worker_proc.system.devices import take_cores

    take_cores(child.config.worker, child.replica)
    files = resolve_model(child.config.model)
    part = TPRank(rank, child.config.worker.tp)
    runner = make_runner(child.config, files, part, store, replica=child.replica)
    runner.warm_up()
    grammars = GrammarCompiler(files, child.endpoints.results)
    runner.table.sampling.compiled = grammars.compiled
    handle = Rank(runner, grammars, grammars.compile_here, send=lambda _: None).handle
    with inference_mode():
        while not isinstance(message := inbox.receive(), StopWorker):
            handle(message)


def _exit_with_rank_0() -> None:
    sys.stdin.buffer.read()
    os._exit(EXIT_LAUNCHER_DIED)


if __name__ == "__main__":
    main()
