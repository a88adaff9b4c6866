"""What says what the bytes of a stored page mean."""

import json
import sys
from hashlib import blake2b

from quadriga import __version__
from quadriga.config.worker_args import WorkerArgs
from quadriga.model_files.fingerprint import weights_digest
from quadriga.model_files.resolve import ModelFiles
from worker_proc.runner import Runner

NAMESPACE_BYTES = 16


def namespace_of(args: WorkerArgs, files: ModelFiles, runner: Runner, page_bytes: int) -> bytes:
    """Return a hash of the model and of all that changes its keys and values, or their layout.

    Args:
        args: The worker's flags.
        files: The model.
        runner: What runs it.
        page_bytes: Size of a page.
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
