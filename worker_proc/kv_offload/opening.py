"""Open the tiers that the flags ask for when a worker starts."""

import logging
import os
from pathlib import Path

from quadriga.config.replica_args import REPLICA_PREFIX, ReplicaPlace
from quadriga.config.worker_args import WorkerArgs
from quadriga.errors import ConfigError
from quadriga.model_files.resolve import ModelFiles
from quadriga.runtime.logs import log_exception
from quadriga.wire.sockets import Outbox
from worker_proc.kv_offload.host_pages import HostPages
from worker_proc.kv_offload.namespace import namespace_of
from worker_proc.kv_offload.page_files import PageFiles
from worker_proc.kv_offload.page_mover import PageMover
from worker_proc.kv_offload.pool_pages import PoolPages
from worker_proc.kv_offload.tier import Tier
from worker_proc.runner import Runner

GIB = 2**30
EXIT_FAILED = 1


def open_tiers(
    args: WorkerArgs, files: ModelFiles, runner: Runner, replica: ReplicaPlace, results: str
) -> PageMover | None:
    """Return what moves pages between the pool and the tiers; None without tiers.

    Args:
        args: The worker's flags.
        files: The model.
        runner: What runs it.
        replica: The replica of this worker: each has tiers of its own, and its share of the sizes.
        results: Address of the scheduler.

    Raises:
        ConfigError: Tiers cannot be used with this model or device, or the directory cannot.
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
