"""The worker's flags that need a native model file."""

from quadriga.config.worker_args import WorkerArgs
from quadriga.errors import ConfigError
from quadriga.model_files.model_impl.choice import ModelImpl


def check_flags(args: WorkerArgs, impl: ModelImpl) -> None:
    """Raise ConfigError for the first flag that is not supported by what runs the model."""
    if impl is ModelImpl.NATIVE:
        return
    for flag, is_set in (
        (
            f"--attention-backend {args.attention_backend}",
            args.attention_backend not in ("auto", "torch"),
        ),
        (f"--quantization {args.quantization}", args.quantization not in ("auto", "none")),
        (f"--kv-cache-dtype {args.kv_cache_dtype}", args.kv_cache_dtype != "auto"),
        ("--enable-deterministic-inference", args.enable_deterministic_inference),
    ):
        if is_set:
            raise ConfigError(
                f"{flag} needs a native model file, but transformers runs this model: leave it out"
            )
