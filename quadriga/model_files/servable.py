"""Checks whether a model can be served, without torch and without its weights.

The launcher makes them before a process starts, and `quadriga models check` reports them.
"""

from quadriga.errors import ModelError
from quadriga.model_files.config.decoder_config import DecoderConfig
from quadriga.model_files.directory import read_json
from quadriga.model_files.gguf.types import check_packed_types
from quadriga.model_files.model_impl.choice import ModelImpl, choose_model_impl, read_native
from quadriga.model_files.quantized.methods import read_quantization
from quadriga.model_files.resolve import ModelFiles

# Limits of worker_proc/cpu/csrc, which a test compares.
MAX_HEAD_DIM, MAX_GROUP_SIZE = 256, 128


def check_servable(files: ModelFiles, quantization: str = "none") -> DecoderConfig | None:
    """Return what the model asks of a native file; None if transformers runs it.

    Args:
        files: The model's files.
        quantization: Value of --quantization.

    Raises:
        ModelError: The architecture, its options or the format of the weights are not supported.
    """
    impl = choose_model_impl(files)
    if quantization == "gguf" and files.weights is not None and files.tensor_index is not None:
        check_packed_types(files.weights, read_json(files.tensor_index))
    if files.weights is not None:
        _check_quantization(files, impl)
    return read_native(files) if impl is ModelImpl.NATIVE else None


def _check_quantization(files: ModelFiles, impl: ModelImpl) -> None:
    """Raise ModelError if the checkpoint is quantized in a way that is not supported."""
    try:
        quantization = read_quantization(files.config)
    except ModelError as error:
        raise ModelError(f"{files.location}: {error}") from None
    if quantization is not None and impl is not ModelImpl.NATIVE:
        raise ModelError(
            f"{files.location}: the weights are quantized ({quantization}), which only native model"
            " files read, and transformers runs this model; take the unquantized one"
        )


def check_tokenizer(files: ModelFiles, num_ids: int) -> None:
    """Raise ModelError if the tokenizer of --tokenizer has `num_ids` ids and the model fewer."""
    if not files.own_tokenizer and num_ids > files.vocab_size:
        raise ModelError(
            f"--tokenizer {files.tokenizer_dir} has {num_ids} ids, but the model only"
            f" {files.vocab_size}: it is the tokenizer of another model"
        )


def check_native_heads(
    heads: int,
    kv_heads: int,
    head_dim: int,
    max_head_dim: int = MAX_HEAD_DIM,
    max_group_size: int = MAX_GROUP_SIZE,
) -> None:
    """Raise ModelError if the native kernels do not support heads of this size or number."""
    for text, value, limit in (
        ("heads of {}", head_dim, max_head_dim),
        ("{} query heads for each key head", heads // kv_heads, max_group_size),
    ):
        if value > limit:
            raise ModelError(
                f"the model has {text.format(value)}, the native kernels compute at most {limit};"
                " use --attention-backend torch"
            )
