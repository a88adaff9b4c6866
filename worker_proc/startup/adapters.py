"""Make the loader of adapters for a worker, or for one of its further ranks."""

import os
import sys
import threading
from pathlib import Path

from quadriga.errors import ModelError
from quadriga.server.models.adapters.content import read_content
from quadriga.server.models.adapters.store import AdapterStore
from quadriga.server.models.resolve import ModelFiles
from quadriga.server.processes.child import Child
from quadriga.wire.adapter import AdapterRef
from quadriga.wire.sockets import Outbox
from quadriga.wire.worker import AdapterReady
from worker_proc.adapters.change import Adapter
from worker_proc.adapters.loader import AdapterLoader
from worker_proc.adapters.reading import read_adapter
from worker_proc.step.runner import Runner

NICENESS = 10


def make_loader(child: Child, files: ModelFiles, runner: Runner, answers: bool) -> AdapterLoader:
    """Return the loader of a rank.

    Args:
        child: this process.
        files: the model.
        runner: has the engine.
        answers: it is rank 0, which the scheduler waits for.
    """
    store = AdapterStore.of_model(child.server_dir, child.of_model, child.config)
    results: list[Outbox] = []

    def read(adapter: AdapterRef) -> Adapter:
        read = _read(child, files, runner, adapter, store.files(adapter))
        return runner.engine.pack_adapter(read)

    def prepare() -> None:
        """Give steps priority, if the system has priorities of threads."""
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        results.append(Outbox(child.endpoints.results))

    def send(ready: AdapterReady) -> None:
        results[0].send(ready)

    engine = runner.engine
    answer = send if answers else None
    return AdapterLoader(read, engine.upload_adapter, engine.set_adapter, answer, prepare)


def check_modules(child: Child, files: ModelFiles, runner: Runner) -> None:
    """Raise ModelError if an adapter of --lora-modules does not fit the model."""
    for module in child.config.model.adapter_modules:
        adapter = AdapterRef("", module.name, module.path)
        _read(child, files, runner, adapter, Path(module.path).expanduser())


def _read(
    child: Child,
    files: ModelFiles,
    runner: Runner,
    adapter: AdapterRef,
    path: Path,
) -> Adapter:
    """Read an adapter for a runner's model.

    Args:
        child: this process.
        files: the model.
        runner: has the engine.
        adapter: the adapter; "" for an id that is not known.
        path: of its files, which may be a copy.

    Raises:
        ModelError: it does not fit the model, or has another content than was expected.
    """
    if runner.places is None:
        raise ModelError(
            f"adapter {adapter.name!r} cannot be used: the engine {runner.engine.name} computes no"
            " adapters; leave --model-impl transformers out, or use --attention-backend torch"
        )
    try:
        content = read_content(path)
        if adapter.id and content.id != adapter.id:
            raise ModelError(
                f"its files {path} have another content by now than when the request was sent: send"
                " the request again"
            )
        return read_adapter(content, runner.places, files, child.config.model.max_lora_rank)
    except ModelError as error:
        reason = str(error).replace(str(path), adapter.path)
        raise ModelError(f"adapter {adapter.name!r}: {reason}") from None
