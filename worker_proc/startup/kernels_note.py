"""What computes, for the receipt of an answer."""

from quadriga.config.worker_args import WorkerArgs
from worker_proc.runner import Runner


def describe_kernels(args: WorkerArgs, runner: Runner) -> str:
    """Return the engine, its version and the number formats.

    Where the engine is deterministic, the same text and the same model give the same bits.
    """
    weights = str(runner.dtype).removeprefix("torch.")
    if runner.quantization not in ("none", "checkpoint"):
        weights += f" {runner.quantization}"
    pages = "" if args.kv_cache_dtype == "auto" else f", {args.kv_cache_dtype} pages"
    ranks = "" if args.tp == 1 else f", tp {args.tp}"
    return f"{runner.engine.kernels}, {weights}{pages}{ranks}"
