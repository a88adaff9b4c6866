"""Open the tiers that the flags ask for when a worker starts.

The namespace, of all that says what the bytes of a stored page mean, comes first.
"""

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from quadriga import __version__
from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import (
    ReplicaPlace,
    WorkerArgs,
)
from quadriga.server.models.resolve import ModelFiles, weights_digest
from quadriga.server.processes.logs import log_exception
from quadriga.wire.sockets import Outbox
from worker_proc.kv_tiers.exchange import PageExchange, PageKind, directory_of
from worker_proc.kv_tiers.page_copies import page_copies
from worker_proc.kv_tiers.page_mover import NICENESS, PageMover, Report, num_spare_of
from worker_proc.kv_tiers.pool_pages import (
    CudaStream,
    DevicePool,
    HostPool,
    HostStream,
    PoolPages,
)
from worker_proc.kv_tiers.tiers import HostPages, MemoryPages, PageFiles
from worker_proc.startup.devices import free_memory
from worker_proc.step.engine import Engine
from worker_proc.step.runner import Runner

NAMESPACE_BYTES = 16


def facts_of(
    args: WorkerArgs, files: ModelFiles, runner: Runner, page_bytes: int
) -> dict[str, Any]:
    """Return the model and all that changes its keys and values, or their layout, by name.

    Args:
        args: the worker's flags.
        files: the model.
        runner: what runs it.
        page_bytes: size of a page.
    """
    return {
        "version": __version__,
        "byteorder": sys.byteorder,
        "model": files.fingerprint,
        "weights": weights_digest(files.weights),
        "context": files.context_length,
        "dtype": str(runner.dtype),
        "quantization": runner.quantization,
        "kv_cache_dtype": args.kv_cache_dtype,
        "kernels": runner.engine.kernels,
        "page_size": args.page_size,
        "page_bytes": page_bytes,
    }


def namespace_of(args: WorkerArgs, files: ModelFiles, runner: Runner, page_bytes: int) -> bytes:
    """Return a hash of all that `facts_of` says of the same arguments."""
    facts = facts_of(args, files, runner, page_bytes)
    text = json.dumps(facts, sort_keys=True).encode()
    return blake2b(text, digest_size=NAMESPACE_BYTES).digest()


GIB = 2**30
PINNED_WAIT_S, PINNED_POLL_S = 5.0, 0.1
EXIT_FAILED = 1


def open_tiers(
    args: WorkerArgs,
    files: ModelFiles,
    runner: Runner,
    replica: ReplicaPlace,
    results: str,
    suspension_dir: str = "",
    exchange: PageExchange | None = None,
) -> PageMover | None:
    """Return what moves pages between the pool and the tiers; None without tiers.

    Args:
        args: the worker's flags.
        files: the model.
        runner: what runs it.
        replica: the replica of this worker: each has tiers of its own, and its share of the sizes.
        results: address of the scheduler.
        suspension_dir: directory of the pages of requests that a suspension interrupts, where the
            flags ask for no tiers; "": there is none.
        exchange: the part in the exchange of pages between replicas; None: there is none.

    Raises:
        ConfigError: tiers cannot be used with this model or device, or the directory cannot.
    """
    if exchange is None and not args.has_offload:
        found = _for_suspension(args, runner, suspension_dir)
        if found is None:
            return None
        args = found
    _check(runner, args.offload_flags if exchange is None else "--prefill-replicas")
    device = runner.table.device
    pages = pool_pages(runner.engine, device)
    peers = on_disk = None
    memory: MemoryPages | None = None
    if exchange is not None:
        kind = PageKind(
            namespace_of(args, files, runner, pages.page_bytes),
            pages.page_bytes,
            facts_of(args, files, runner, pages.page_bytes),
        )
        peers = exchange.peers(args, kind, page_copies(may_compile=True))
    if exchange is not None and exchange.has_memory(args):
        memory = exchange.open_memory(
            args, files, runner, replica, kind, page_copies(may_compile=True), num_spare_of(pages)
        )  # fmt: skip
        pages.take_from(memory)
        exchange.serve(replica, kind, _die)
    elif args.kv_offloading_size:
        num_bytes = int(args.kv_offloading_size * GIB / replica.num_replicas)
        memory = HostPages(_num_pages("kv_offloading_size", num_bytes, pages.page_bytes))
        if device.type == "cuda":
            _check_pinned(args, num_bytes)
    if args.kv_cache_dir:
        on_disk = _page_files(args, files, runner, replica, pages.page_bytes)

    def make_sender() -> Callable[[Report], object]:
        if device.type == "cuda":  # a thread begins on GPU 0
            torch.cuda.set_device(device)
        return Outbox(results).send

    # A stream waits while its pages move from one replica to another.
    niceness = NICENESS if exchange is None else 0
    return PageMover(
        pages, args.page_size, memory, on_disk, make_sender, _die, peers, niceness
    )  # fmt: skip


# Of the free space of the disk with the directory of the run.
SUSPENSION_SHARE, MIN_SUSPENSION_GIB = 0.25, 0.5


def _for_suspension(args: WorkerArgs, runner: Runner, directory: str) -> WorkerArgs | None:
    """Return flags of a tier for suspensions; None where this model or device has none.

    Without it, what was computed before a suspension is computed again.
    """
    if not directory or args.tp > 1 or not runner.engine.has_head:
        return None
    Path(directory).mkdir(mode=0o700, exist_ok=True)
    size = SUSPENSION_SHARE * shutil.disk_usage(directory).free / GIB
    if size < MIN_SUSPENSION_GIB:
        return None
    changed = replace(args, kv_cache_dir=directory, kv_cache_dir_size=size)
    try:
        _check(runner, changed.offload_flags)
    except ConfigError as error:
        logging.debug("what a suspension interrupts is computed again: %s", error)
        return None
    return changed


def pool_pages(engine: Engine, device: torch.device) -> PoolPages:
    """Return access to the pages of an engine.

    The engine for a GPU has it as on a GPU, also where it runs on a CPU in tests.
    """
    if device.type == "cuda":
        return DevicePool(engine.kv_pools(), CudaStream(device))
    if engine.is_for_gpu:
        return DevicePool(engine.kv_pools(), HostStream())
    return HostPool(engine.kv_parts(), engine.kv_numbers())


def _check_pinned(args: WorkerArgs, num_bytes: int) -> None:
    """Raise ConfigError if memory that is pinned at once is more than what is free.

    That of a worker that was killed may not be back yet.
    """
    give_up_at = time.monotonic() + PINNED_WAIT_S
    while (free_bytes := free_memory(torch.device("cpu"))) < num_bytes:
        if time.monotonic() < give_up_at:
            time.sleep(PINNED_POLL_S)
            continue
        raise ConfigError(
            f"kv_offloading_size is {args.kv_offloading_size:g}: a GPU needs it pinned, and of"
            f" {num_bytes / GIB:.1f} GiB for each replica {free_bytes / GIB:.1f} GiB are free in"
            " the computer's memory: lower it"
        )


def _die() -> None:
    """End the worker, so that another one takes its place."""
    log_exception()
    os._exit(EXIT_FAILED)


def _page_files(
    args: WorkerArgs, files: ModelFiles, runner: Runner, replica: ReplicaPlace, page_bytes: int
) -> PageFiles:
    directory = directory_of(Path(args.kv_cache_dir).absolute(), replica.number)
    num_bytes = int(args.kv_cache_dir_size * GIB / replica.num_replicas)
    _num_pages("kv_cache_dir_size", num_bytes, page_bytes)
    namespace = namespace_of(args, files, runner, page_bytes)
    found = PageFiles(directory, namespace, page_bytes, num_bytes)
    num_pages = sum(1 for _ in found.names())
    logging.info(
        "the KV cache in %s has %d tokens of this model", directory, num_pages * args.page_size
    )
    return found


def _num_pages(flag: str, num_bytes: int, page_bytes: int) -> int:
    """Return how many pages fit. Raise ConfigError if none does."""
    if num_bytes < 2 * page_bytes:
        raise ConfigError(
            f"{flag} has room for {num_bytes} bytes in each replica, and a page of this model takes"
            f" {page_bytes}: raise it, or lower --page-size"
        )
    return num_bytes // page_bytes


def _check(runner: Runner, flags: str) -> None:
    """Raise ConfigError if flags of tiers do not work with the model or the device."""
    if runner.table.device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"{flags} works on a CPU and on CUDA, and the device is {runner.table.device}: leave it"
            " out"
        )
    if runner.window:
        raise ConfigError(
            f"{flags} needs a model with a layer that sees all tokens, and each layer of this one"
            f" has a window of {runner.window} tokens: leave it out"
        )
