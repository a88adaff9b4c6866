"""Make the loader of adapters for a worker or a further rank of it, and read their files."""

import logging
import os
import sys
import threading
from pathlib import Path

from quadriga.errors import ModelError
from quadriga.server.models.adapters.content import AdapterContent, read_content
from quadriga.server.models.adapters.peft_config import CONFIG_NAME, PeftConfig
from quadriga.server.models.adapters.store import AdapterStore
from quadriga.server.models.formats.directory import read_config
from quadriga.server.models.resolve import ModelFiles
from quadriga.server.processes.child import Child
from quadriga.wire.adapter import AdapterRef
from quadriga.wire.sockets import Outbox
from quadriga.wire.worker import AdapterReady
from worker_proc.adapters.base_tensors import BaseTensors
from worker_proc.adapters.change import Adapter
from worker_proc.adapters.gguf_file import read_gguf
from worker_proc.adapters.loader import AdapterLoader
from worker_proc.adapters.peft_files import read_peft
from worker_proc.adapters.places import Places
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


# Sizes of config.json that two models of one adapter share.
_SIZES = ("model_type", "hidden_size", "n_embd", "num_hidden_layers", "n_layer")


def read_adapter(
    content: AdapterContent, places: Places, files: ModelFiles, max_rank: int | None = None
) -> Adapter:
    """Return an adapter for a model, or for the part of it that this rank has.

    Args:
        content: the adapter's files.
        places: of the model.
        files: the model's files.
        max_rank: the largest rank that is served; None: there is no limit.

    Raises:
        ModelError: the adapter is broken, or does not fit the model.
    """
    try:
        if content.config is None:
            adapter = read_gguf(content, places, files.config, max_rank)
        else:
            _check_base(content.config, files)
            base = BaseTensors(files, places.config)
            adapter = read_peft(content, places, base, max_rank)
        if not all(bool(tensor.isfinite().all()) for tensor in adapter.tensors()):
            raise ModelError("its numbers overflow in float32; train it again")
        return adapter
    except ModelError as error:
        raise ModelError(f"the adapter {content.path}: {error}") from None


def _check_base(config: PeftConfig, files: ModelFiles) -> None:
    """Raise ModelError if the adapter names a base here whose sizes are others; log its name."""
    if not config.base or config.base in (files.name, files.location):
        return
    directory = Path(config.base).expanduser()
    if (directory / "config.json").is_file():
        named = read_config(directory)
        theirs, ours = ({key: c.get(key) for key in _SIZES} for c in (named, files.config))
        if theirs != ours:
            raise ModelError(
                f"its {CONFIG_NAME} names the base {config.base}, which has {_shown(theirs)}; the"
                f" model {files.name} has {_shown(ours)}: serve it with its own base"
            )
    logging.info("an adapter names the base %s; the model is %s", config.base, files.name)


def _shown(sizes: dict[str, object]) -> str:
    return ", ".join(f"{key} {value}" for key, value in sizes.items() if value is not None)
