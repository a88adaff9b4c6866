"""Starts a spare worker: `python -m worker_proc.spare DESCRIPTOR`.

It imports what a worker needs, and waits until the launcher says of which model it is the worker.
"""

import gc
import sys

from quadriga.server.config.engine_args import WorkerArgs
from quadriga.server.models.model_impl import ModelImpl
from quadriga.server.processes.spare import receive_command
from worker_proc.main import main, set_up
from worker_proc.startup.torch_import import import_torch


def run() -> None:
    """Import, wait, and be the worker."""
    gc.disable()  # as in quadriga/programs.py
    set_up()
    import_torch(WorkerArgs(), ModelImpl.NATIVE)
    import worker_proc.kv_tiers.opening
    import worker_proc.rank
    import worker_proc.startup.build
    import worker_proc.startup.drafts
    import worker_proc.startup.prefill_tuning  # noqa: F401

    gc.freeze()
    command = receive_command(int(sys.argv[1]))
    sys.argv = command[command.index("worker_proc") :]
    main()


if __name__ == "__main__":
    run()
