"""Open the tiers that the flags ask for when a worker starts.

The namespace, of all that says what the bytes of a stored page mean, comes first.
"""

import json
import logging
import os
import sys
from hashlib import blake2b
from pathlib import Path

from quadriga import __version__
from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import REPLICA_PREFIX, ReplicaPlace, WorkerArgs
from quadriga.server.models.resolve import ModelFiles, weights_digest
from quadriga.server.processes.logs import log_exception
from quadriga.wire.sockets import Outbox
from worker_proc.kv_tiers.page_mover import PageMover
from worker_proc.kv_tiers.tiers import HostPages, PageFiles, PoolPages, Tier
from worker_proc.step.runner import Runner

NAMESPACE_BYTES = 16


def namespace_of(args: WorkerArgs, files: ModelFiles, runner: Runner, page_bytes: int) -> bytes:
    """Return a hash of the model and of all that changes its keys and values, or their layout.

    Args:
        args: the worker's flags.
        files: the model.
        runner: what runs it.
        page_bytes: size of a page.
    """
    facts = {
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
    text = json.dumps(facts, sort_keys=True).encode()
    return blake2b(text, digest_size=NAMESPACE_BYTES).digest()


GIB = 2**30
EXIT_FAILED = 1


def open_tiers(
    args: WorkerArgs, files: ModelFiles, runner: Runner, replica: ReplicaPlace, results: str
) -> PageMover | None:
    """Return what moves pages between the pool and the tiers; None without tiers.

    Args:
        args: the worker's flags.
        files: the model.
        runner: what runs it.
        replica: the replica of this worker: each has tiers of its own, and its share of the sizes.
        results: address of the scheduler.

    Raises:
        ConfigError: tiers cannot be used with this model or device, or the directory cannot.
    """
    if not args.has_offload:
        return None
    _check(args, runner)
    pages = PoolPages(runner.engine.kv_parts(), runner.engine.kv_numbers())
    tiers: list[Tier] = []
    if args.kv_offloading_size:
        num_bytes = int(args.kv_offloading_size * GIB / replica.num_replicas)
        tiers.append(HostPages(_num_pages("kv_offloading_size", num_bytes, pages.page_bytes)))
    if args.kv_cache_dir:
        tiers.append(_page_files(args, files, runner, replica, pages.page_bytes))
    return PageMover(pages, args.page_size, tiers, lambda: Outbox(results).send, _die)


def _die() -> None:
    """End the worker, so that another one takes its place."""
    log_exception()
    os._exit(EXIT_FAILED)


def _page_files(
    args: WorkerArgs, files: ModelFiles, runner: Runner, replica: ReplicaPlace, page_bytes: int
) -> PageFiles:
    directory = Path(args.kv_cache_dir).absolute()
    if replica.number:
        directory /= f"{REPLICA_PREFIX}{replica.number}"
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


def _check(args: WorkerArgs, runner: Runner) -> None:
    flags = args.offload_flags
    if runner.table.device.type != "cpu":
        raise ConfigError(
            f"{flags} works with --device cpu only, and the device is {runner.table.device}: leave"
            " it out"
        )
    if runner.window:
        raise ConfigError(
            f"{flags} needs a model with a layer that sees all tokens, and each layer of this one"
            f" has a window of {runner.window} tokens: leave it out"
        )
