"""What a server would do with a model, found without torch and without reading its weights."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from quadriga.errors import ModelError, QuadrigaError
from quadriga.sampling.validation import find_unserved_tokens
from quadriga.server.config.engine_args import OTHER_FRACTION, ModelArgs, WorkerArgs
from quadriga.server.models.families.architectures import find_architecture, kv_bytes_per_token
from quadriga.server.models.families.decoder_config import DecoderConfig
from quadriga.server.models.families.gpt import find_gpt2_size
from quadriga.server.models.families.windows import common_window, num_seen_pages
from quadriga.server.models.formats.directory import read_json
from quadriga.server.models.formats.quantization import BLOCK_SIZES, FLOAT_TYPES, read_quantization
from quadriga.server.models.formats.tokenizer import (
    load_tokenizer,
    template_source,
)
from quadriga.server.models.model_impl import check_native_heads, check_servable, check_tokenizer
from quadriga.server.models.resolve import ModelFiles, resolve_model
from quadriga.server.models.sources import (
    BUILTINS,
    cached_builtin_weights,
    cached_snapshot,
    looks_like_a_path,
)
from quadriga.server.models.weight_modes import WeightMode, Weights, best_mode, weight_modes
from quadriga.server.models.weights import summarize_weights
from quadriga.server.processes.machine import NoCompiler, find_compiler

NATIVE, TORCH, REFUSED = "native kernels", "torch", "refused"
TRANSFORMERS = "transformers (its attention is checked at the start)"
ITEM_BYTES = {NATIVE: 2, TORCH: 4}  # bfloat16 and float32: --dtype auto on a CPU


@dataclass(slots=True)
class ModelReport:
    """What is known of a model; a refused one may lack everything after `refusal`.

    Attributes:
        way: how a CPU computes it: native kernels, torch, transformers or refused.
        refusal: the server's error; "" if it can be served.
        weight_bytes: bytes by format, as stored.
        quantization: method and bits of a quantized checkpoint.
        kv_bytes_per_token: bytes by number format of the KV cache.
        context_length: tokens of the model's context, or the given limit.
        window: tokens that every layer's attention is limited to; 0 if a layer sees all.
        max_context_here: tokens of one request that the KV pool holds in the memory free now.
        rope: kind of the rotary positions' scaling, or learned.
        modes: how the native kernels can keep the weights, the default mode first; none of an
            encoder, which takes no steps.
        best_mode: name of the mode to take in the memory that is free now; "" if none fits.
        memory_bandwidth: bytes per second that this machine reads; None: not measured.
        notes: what the start of a server says about the model.
    """

    name: str
    way: str = REFUSED
    refusal: str = ""
    location: str = ""
    architecture: str = ""
    weight_bytes: dict[str, int] = field(default_factory=dict)
    quantization: str = ""
    num_parameters: int | None = None
    kv_bytes_per_token: dict[str, int] = field(default_factory=dict)
    context_length: int | None = None
    window: int = 0
    max_context_here: int | None = None
    rope: str = ""
    modes: list[WeightMode] = field(default_factory=list)
    best_mode: str = ""
    memory_bandwidth: float | None = None
    vocab_size: int | None = None
    chat_template: bool | None = None
    tokenizer: bool | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def is_servable(self) -> bool:
        """Whether the server would start."""
        return not self.refusal


def check_model(
    model: str, measure_bandwidth: Callable[[], float] | None = None, **flags: Any
) -> ModelReport:
    """Report on a built-in name, a Hub id in the cache, a directory or a .gguf.

    Args:
        model: value of --model.
        measure_bandwidth: returns the bytes per second that this machine reads; None: no speeds
            are estimated.
        flags: further fields of ModelArgs.
    """
    report = ModelReport(model)
    try:
        location = _on_this_machine(model)
        files = resolve_model(ModelArgs(model=location, **flags))
        _describe_files(report, files)
        config = check_servable(files)
        if config is not None:
            _describe_architecture(report, files, config)
        _check_tokenizer(report, files)
        weights = summarize_weights(files)
        report.weight_bytes = dict(weights.bytes_by_format)
        report.num_parameters = weights.num_parameters
        report.way = TRANSFORMERS if config is None else _way(config)
        if config is not None:
            if report.way == NATIVE and not files.is_encoder:
                _list_modes(report, config, measure_bandwidth)
            _fit_memory(report)
    except QuadrigaError as error:
        report.way, report.refusal = REFUSED, str(error)
    return report


def _on_this_machine(model: str) -> str:
    """Return a value of --model that is resolved without a network."""
    if model in BUILTINS:
        if cached_builtin_weights(model) is None:
            raise ModelError(
                f"{model} is not fetched yet; quadriga serve --model {model} fetches it"
                f" ({BUILTINS[model].download_mb} MB)"
            )
        return model
    if Path(model).expanduser().exists() or looks_like_a_path(model):
        return model
    size = find_gpt2_size(model)
    directory = cached_snapshot(model if size is None else size.hub_id)
    if directory is None:
        raise ModelError(
            f"{model} is no file, directory or built-in name, and it is not in the Hub's local"
            f" cache; quadriga serve {model} fetches it"
        )
    return str(directory)


def _describe_files(report: ModelReport, files: ModelFiles) -> None:
    report.location = files.location
    report.architecture = str(files.config.get("model_type") or "")
    report.context_length, report.vocab_size = files.context_length, files.vocab_size
    report.notes += files.notes
    settings = read_json(files.tokenizer_dir / "tokenizer_config.json")
    report.chat_template = template_source(files.tokenizer_dir, settings) is not None
    report.tokenizer = (files.tokenizer_dir / "tokenizer.json").is_file()


def _describe_architecture(report: ModelReport, files: ModelFiles, config: DecoderConfig) -> None:
    report.architecture = find_architecture(files.config)
    report.quantization = str(read_quantization(files.config) or "")
    kinds = sorted({rope.kind for rope in config.ropes if rope is not None})
    report.rope = ", ".join(kinds) or "learned positions"
    report.window = common_window(config.windows)
    shape = (config.num_layers, config.num_kv_heads, config.head_dim)
    report.kv_bytes_per_token = {
        "float32": kv_bytes_per_token(*shape, 4),
        "bfloat16": kv_bytes_per_token(*shape, 2),
        "int8": kv_bytes_per_token(*shape, 1, int8=True),
        "fp8": kv_bytes_per_token(*shape, 1),
    }


def _check_tokenizer(report: ModelReport, files: ModelFiles) -> None:
    report.tokenizer = False
    tokenizer = load_tokenizer(files.tokenizer_dir)
    check_tokenizer(files, tokenizer.get_vocab_size())
    report.tokenizer = True
    if note := find_unserved_tokens(tokenizer, files.vocab_size).note:
        report.notes.append(note)


def _way(config: DecoderConfig) -> str:
    try:
        find_compiler()
    except NoCompiler:
        return TORCH
    check_native_heads(config.num_heads, config.num_kv_heads, config.head_dim)
    return NATIVE


def _list_modes(
    report: ModelReport, config: DecoderConfig, measure_bandwidth: Callable[[], float] | None
) -> None:
    """Add how the weights can be kept, and which mode fits best."""
    types = set(report.weight_bytes) - set(FLOAT_TYPES)
    stored_bits = "checkpoint" if report.quantization else ""
    if not stored_bits and types and types <= BLOCK_SIZES.keys():
        stored_bits = "gguf"
    num_bytes = sum(report.weight_bytes.values())
    report.memory_bandwidth = None if measure_bandwidth is None else measure_bandwidth()
    report.modes = weight_modes(
        Weights.of(config, report.num_parameters or 0, num_bytes),
        stored_bits,
        report.memory_bandwidth,
    )
    best = best_mode(report.modes, psutil.virtual_memory().available)
    report.best_mode = "" if best is None else best.name


def _fit_memory(report: ModelReport) -> None:
    """Compute the context from the memory that is free now and the default KV pool's share."""
    weight_bytes = (report.num_parameters or 0) * ITEM_BYTES[report.way]
    if report.modes:
        weight_bytes = report.modes[0].weight_bytes
    pool_bytes = (psutil.virtual_memory().available - weight_bytes) * OTHER_FRACTION
    dtype = "bfloat16" if report.way == NATIVE else "float32"
    num_tokens = int(pool_bytes // report.kv_bytes_per_token[dtype])
    context_length = needed = report.context_length or num_tokens
    if report.window:
        page_size = WorkerArgs().page_size
        needed = min(needed, (num_seen_pages(report.window, page_size) + 1) * page_size)
    report.max_context_here = context_length if num_tokens >= needed else max(0, num_tokens)
    if num_tokens < 1:
        flags = next((mode.flags for mode in report.modes if mode.name == report.best_mode), "")
        raise ModelError(
            f"{report.name}: the weights take {weight_bytes / 2**20:.0f} MiB in"
            f" {report.quantization or dtype}, which does"
            " not leave memory for a KV pool; take "
            + (f"{flags}, a smaller model" if flags else "a smaller model")
            + " or free memory"
        )
