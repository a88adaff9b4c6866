"""`quadriga models` and `quadriga models check MODEL`; model_states.py has its other commands."""

import argparse
import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quadriga.client import Client
from quadriga.errors import ConfigError, ModelError, QuadrigaError
from quadriga.programs import install_command
from quadriga.sampling.validation import find_unserved_tokens
from quadriga.server.cli import model_states, server_api, shared
from quadriga.server.config.engine_args import (
    CUDA_FRACTION,
    OTHER_FRACTION,
    ModelArgs,
    WorkerArgs,
)
from quadriga.server.models.families import decoder_config, gpt, windows
from quadriga.server.models.families.architectures import find_architecture, kv_bytes_per_token
from quadriga.server.models.formats.directory import read_json
from quadriga.server.models.formats.gguf_reader import read_architecture_name
from quadriga.server.models.formats.quantization import BLOCK_SIZES, FLOAT_TYPES, read_quantization
from quadriga.server.models.formats.tokenizer import load_tokenizer, template_source
from quadriga.server.models.gpu_modes import (
    GpuMode,
    GpuWeights,
    best_gpu_mode,
    gpu_modes,
    step_bytes,
)
from quadriga.server.models.model_impl import check_native_heads, check_servable, check_tokenizer
from quadriga.server.models.resolve import ModelFiles, resolve_model
from quadriga.server.models.sources import (
    BUILTINS,
    BuiltinModel,
    cached_builtin_weights,
    cached_models,
    cached_snapshot,
    looks_like_a_path,
)
from quadriga.server.models.weight_modes import (
    WeightMode,
    Weights,
    best_mode,
    memory_bandwidth,
    weight_modes,
)
from quadriga.server.models.weights import WeightSummary, summarize_weights, weight_files
from quadriga.server.processes.machine import NoCompiler, find_compiler, num_usable_cores

EXIT_NOT_SERVABLE = 1
CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S = 0.5, 2.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    shared.add_server(parser)
    commands = parser.add_subparsers(title="commands")
    model_states.add_commands(commands)
    check = commands.add_parser(
        "check",
        help="whether a server can serve a model, and in which memory; exit code 1: it cannot",
        description="Say whether a server can serve a model that is on this machine, and what to"
        " expect of each way to keep its weights on this machine's CPU: bytes, memory and tokens/s"
        " of one stream, estimated from the memory bandwidth, which is measured in a second."
        " With --device cuda: what fits a GPU of --gpu-memory, which need not be here. No weights"
        " are read.",
        allow_abbrev=False,
    )
    check.add_argument("model", help="Hub id in the cache, directory, .gguf file or built-in name")
    check.add_argument("--tokenizer", default="", metavar="MODEL", help="as of quadriga serve")
    check.add_argument("--context-length", type=int, metavar="TOKENS", help="as of quadriga serve")
    check.add_argument(
        "--model-impl",
        choices=("auto", "native", "transformers"),
        default="auto",
        help="as of quadriga serve",
    )
    check.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="what is to compute: this machine's CPU, or an NVIDIA GPU (default: cpu)",
    )
    check.add_argument(
        "--gpu-memory",
        metavar="SIZE",
        help="memory of the GPU, such as 24GiB (default: that of the first one here)",
    )
    check.add_argument("--trust-remote-code", action="store_true", help="as of quadriga serve")
    check.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="print JSON, for programs"
    )
    check.set_defaults(run_models=_check)


def run(arguments: argparse.Namespace) -> None:
    """List the models or check one. Raise SystemExit with code 1 if it cannot be served."""
    getattr(arguments, "run_models", _list)(arguments)


def _list(arguments: argparse.Namespace) -> None:
    models = local_models()
    models += served_models(arguments.endpoint, arguments.curve_dir, arguments.api_key)
    if arguments.json:
        print(json.dumps([asdict(model) for model in models], indent=1))
        return
    rows = [
        (model.name, model.where, model.architecture or "-", _size(model.num_bytes))
        for model in models
    ]
    shared.print_table([("name", "where", "architecture", "size"), *rows])


def _check(arguments: argparse.Namespace) -> None:
    try:
        report = check_model(
            arguments.model,
            lambda: memory_bandwidth(num_usable_cores()),
            _gpu_bytes(arguments),
            tokenizer=arguments.tokenizer,
            context_length=arguments.context_length,
            model_impl=arguments.model_impl,
            trust_remote_code=arguments.trust_remote_code,
        )
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"models check needs the package {error.name}: {install_command('serve')}"
        ) from None
    if arguments.json:
        print(json.dumps({"servable": report.is_servable, **asdict(report)}, indent=1))
    else:
        formats = [f"{kind} {_size(count)}" for kind, count in report.weight_bytes.items()]
        cache = [f"{dtype} {count}" for dtype, count in report.kv_bytes_per_token.items()]
        rows = [
            ("model", report.name),
            ("files", report.location),
            ("way", f"{report.way}: {report.refusal}" if report.refusal else report.way),
            ("architecture", report.architecture),
            ("weights", ", ".join(formats)),
            ("quantization", report.quantization),
            ("parameters", _count(report.num_parameters)),
            ("KV bytes per token", ", ".join(cache)),
            ("context", _count(report.context_length)),
            ("window", _count(report.window or None)),
            (
                "context that fits" if report.gpu_bytes else "context that fits here",
                _count(report.max_context_here),
            ),
            ("rope", report.rope),
            ("vocabulary", _count(report.vocab_size)),
            ("chat template", _yes_no(report.chat_template)),
            ("tokenizer", _yes_no(report.tokenizer)),
            *(("note", note) for note in report.notes),
        ]
        shared.print_table([row for row in rows if row[1]])
        if report.modes:
            _print_modes(report)
        if report.gpu_modes:
            _print_gpu_modes(report)
    if not report.is_servable:
        sys.exit(EXIT_NOT_SERVABLE)


def _print_modes(report: "ModelReport") -> None:
    """Print what to expect of each mode, and which one to take."""
    rows: list[tuple[str, ...]] = [
        ("mode", "flags of quadriga serve", "weights", "read per token", "memory", "tokens/s", "")
    ]
    best = "none fits in the memory that is free now"
    for mode in report.modes:
        rows.append(
            (
                mode.name,
                mode.flags or "none (default)",
                _size(mode.weight_bytes),
                _size(mode.bytes_per_token),
                f"{mode.memory_bytes / 1e9:.1f} GB",
                "-" if mode.tokens_per_s is None else f"{mode.tokens_per_s:.0f}",
                mode.note,
            )
        )
        if mode.name == report.best_mode:
            best = f"{mode.name}, {mode.flags or 'which needs no flag'}"
    print()
    shared.print_table(rows)
    print(f"best here: {best}")
    if report.memory_bandwidth is not None:
        print(
            "\nmemory and tokens/s are estimates for this machine's CPU, which reads"
            f" {report.memory_bandwidth / 1e9:.0f} GB/s (measured now):\none stream, a short"
            " context, no guessed tokens, nothing else running; the KV pool is not counted"
        )


def _print_gpu_modes(report: "ModelReport") -> None:
    """Print what fits a GPU in each mode, and which one to take."""
    rows: list[tuple[str, ...]] = [
        ("mode", "flags of quadriga serve", "weights", "KV tokens", "with fp8 KV", "")
    ]
    best = "none: no mode fits"
    for mode in report.gpu_modes:
        rows.append(
            (
                mode.name,
                mode.flags or "none (default)",
                _size(mode.weight_bytes),
                f"{mode.num_tokens:,}" if mode.fits else "does not fit",
                "-" if mode.num_tokens_fp8 is None else f"{mode.num_tokens_fp8:,}",
                mode.note,
            )
        )
        if mode.name == report.best_mode:
            best = f"{mode.name}, {mode.flags or 'which needs no flag'}"
    print()
    shared.print_table(rows)
    print(f"best there: {best}")
    print(
        f"\nestimates for a GPU with {(report.gpu_bytes or 0) / GIB:.1f} GiB: steps, graphs and"
        f" CUDA take {_size(report.step_bytes)}, the KV cache\n{CUDA_FRACTION:.0%} of the rest"
        " (--mem-fraction-static). Tokens are those of all open requests together;"
        " --kv-cache-dtype fp8 needs compute\ncapability 8.9. Fewer than 16 bits a weight need the"
        f" extra gpu: {install_command('gpu')}"
    )


GIB = 2**30
SIZE = re.compile(r"([0-9.]+) *(GiB|GB|MiB|G|)", re.IGNORECASE)
UNITS = {"gib": GIB, "g": GIB, "": GIB, "gb": 10**9, "mib": 2**20}
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader")
NVIDIA_SMI_TIMEOUT_S = 10.0


def _gpu_bytes(arguments: argparse.Namespace) -> int | None:
    """Return the memory of the GPU of the command line; None: the CPU is to compute."""
    if arguments.device == "cpu":
        if arguments.gpu_memory is not None:
            raise ConfigError("--gpu-memory is about --device cuda: add that, or leave it out")
        return None
    text = arguments.gpu_memory
    if text is None:
        try:
            done = subprocess.run(
                NVIDIA_SMI, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True
            )
        except (OSError, subprocess.SubprocessError):
            raise ConfigError(
                "nvidia-smi finds no GPU here: say how much memory it has, such as --gpu-memory"
                " 24GiB"
            ) from None
        text = done.stdout.partition("\n")[0].strip()
    found = SIZE.fullmatch(text)
    try:
        num_bytes = int(float(found[1]) * UNITS[found[2].lower()]) if found else 0
    except ValueError:  # such as 1.2.3
        num_bytes = 0
    if num_bytes < 1:
        raise ConfigError(f"--gpu-memory is {text!r}: write a size such as 24GiB, 80GB or 24564MiB")
    return num_bytes


def _size(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "-"
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _yes_no(value: bool | None) -> str:
    return {None: "", True: "yes", False: "no"}[value]


# --- the models of this machine, and the one that a server serves ---------------------------------


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A row of the table.

    Attributes:
        name: a value of --model, or the served name.
        where: built-in, Hub cache, or the server's endpoint.
        architecture: as its files name it; "" if unknown.
        num_bytes: bytes of the weights; None if they are not here.
    """

    name: str
    where: str
    architecture: str = ""
    num_bytes: int | None = None


def local_models() -> list[ListedModel]:
    """Return the built-in models and those of the Hub's cache, without a network."""
    builtins = [_from_catalog(model) for model in BUILTINS.values()]
    return builtins + [_from_hub(name, path) for name, path in cached_models().items()]


def served_models(endpoint: str, curve_dir: str | None, api_key: str = "") -> list[ListedModel]:
    """Return the models of the server at an address; none if no server answers."""
    try:
        if shared.is_web_address(endpoint):
            cards = server_api.ServerApi(endpoint, api_key).models()
            names = [str(card["id"]) for card in cards]
        else:
            with Client(endpoint, connect_timeout=CONNECT_TIMEOUT_S, curve_dir=curve_dir) as client:
                names = [str(client.info(ANSWER_TIMEOUT_S)["model"])]
    except QuadrigaError:
        return []
    return [ListedModel(name, f"served at {endpoint}") for name in names]


def _from_catalog(model: BuiltinModel) -> ListedModel:
    weights = cached_builtin_weights(model.name)
    if weights is None:
        return ListedModel(model.name, f"built-in, not fetched yet ({model.download_mb} MB)")
    if weights.is_dir():
        return dataclasses.replace(_from_hub(model.name, weights), where="built-in")
    architecture = read_architecture_name(weights) or ""
    return ListedModel(model.name, "built-in", architecture, weights.stat().st_size)


def _from_hub(name: str, path: Path) -> ListedModel:
    try:
        architecture = str(read_json(path / "config.json").get("model_type") or "")
    except ModelError:
        architecture = "unreadable config.json"
    files = [file for file in weight_files(path) if file.is_file()]
    num_bytes = sum(file.stat().st_size for file in files) if files else None
    return ListedModel(name, "Hub cache", architecture, num_bytes)


# --- what a server would do with a model, found without torch and without reading its weights -----


NATIVE, TORCH, REFUSED = "native kernels", "torch", "refused"
ON_GPU = "Triton kernels on a GPU"
TRANSFORMERS = "transformers (its attention is checked at the start)"
ITEM_BYTES = {NATIVE: 2, TORCH: 4}  # bfloat16 and float32: --dtype auto on a CPU


@dataclass(slots=True)
class ModelReport:
    """What is known of a model; a refused one may lack everything after `refusal`.

    Attributes:
        way: how a CPU, or the GPU, computes it: native kernels, Triton kernels, torch, transformers
            or refused.
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
        gpu_bytes: memory of the GPU that is to compute; None: a CPU is.
        step_bytes: of the GPU's memory, beside weights and KV cache.
        gpu_modes: how the GPU can keep the weights, the default mode first; none of an encoder and
            of a model of transformers.
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
    gpu_bytes: int | None = None
    step_bytes: int | None = None
    gpu_modes: list[GpuMode] = field(default_factory=list)
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
    model: str,
    measure_bandwidth: Callable[[], float] | None = None,
    gpu_bytes: int | None = None,
    **flags: Any,
) -> ModelReport:
    """Report on a built-in name, a Hub id in the cache, a directory or a .gguf.

    Args:
        model: value of --model.
        measure_bandwidth: returns the bytes per second that this machine reads; None: no speeds
            are estimated.
        gpu_bytes: memory of the GPU that is to compute; None: this machine's CPU is.
        flags: further fields of ModelArgs.
    """
    report = ModelReport(model, gpu_bytes=gpu_bytes)
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
        if config is not None and gpu_bytes is not None:
            report.way = TORCH if files.is_encoder else ON_GPU
            if not files.is_encoder:
                _fit_gpu(report, files, config, weights, gpu_bytes)
        elif config is not None:
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
    size = gpt.find_gpt2_size(model)
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


def _describe_architecture(
    report: ModelReport, files: ModelFiles, config: decoder_config.DecoderConfig
) -> None:
    report.architecture = find_architecture(files.config)
    report.quantization = str(read_quantization(files.config) or "")
    kinds = sorted({rope.kind for rope in config.ropes if rope is not None})
    report.rope = ", ".join(kinds) or "learned positions"
    report.window = windows.common_window(config.windows)
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


def _way(config: decoder_config.DecoderConfig) -> str:
    try:
        find_compiler()
    except NoCompiler:
        return TORCH
    check_native_heads(config.num_heads, config.num_kv_heads, config.head_dim)
    return NATIVE


def _list_modes(
    report: ModelReport,
    config: decoder_config.DecoderConfig,
    measure_bandwidth: Callable[[], float] | None,
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
    best = best_mode(report.modes, _free_bytes())
    report.best_mode = "" if best is None else best.name


def _free_bytes() -> int:
    import psutil  # part of the extra `serve`

    return int(psutil.virtual_memory().available)


def _fit_gpu(
    report: ModelReport,
    files: ModelFiles,
    config: decoder_config.DecoderConfig,
    summary: WeightSummary,
    gpu_bytes: int,
) -> None:
    """Add what fits a GPU. Raise ModelError if the default mode does not."""
    quantization = read_quantization(files.config)
    weights = GpuWeights.of_files(config, summary, quantization)
    report.step_bytes = step_bytes(config, summary.num_parameters)
    is_checkpoint = quantization is not None
    modes = gpu_modes(config, weights, gpu_bytes, files.context_length, is_checkpoint)
    best = best_gpu_mode(modes)
    report.gpu_modes, report.best_mode = modes, "" if best is None else best.name
    report.max_context_here = _longest_context(report, modes[0].num_tokens)
    if not modes[0].fits:
        taken = modes[0].weight_bytes + report.step_bytes
        flags = "" if best is None else f"{best.flags}, "
        raise ModelError(
            f"{report.name}: the weights, {modes[0].name}, and steps take {taken / GIB:.1f} GiB of"
            f" the GPU's {gpu_bytes / GIB:.1f}: take {flags}a smaller model, or --tp"
        )


def _longest_context(report: ModelReport, num_tokens: int) -> int:
    """Return the tokens of the longest request in a KV pool of `num_tokens`."""
    context_length = needed = report.context_length or num_tokens
    if report.window:
        page_size = WorkerArgs().page_size
        needed = min(needed, (windows.num_seen_pages(report.window, page_size) + 1) * page_size)
    return context_length if num_tokens >= needed else max(0, num_tokens)


def _fit_memory(report: ModelReport) -> None:
    """Compute the context from the memory that is free now and the default KV pool's share."""
    weight_bytes = (report.num_parameters or 0) * ITEM_BYTES[report.way]
    if report.modes:
        weight_bytes = report.modes[0].weight_bytes
    pool_bytes = (_free_bytes() - weight_bytes) * OTHER_FRACTION
    dtype = "bfloat16" if report.way == NATIVE else "float32"
    num_tokens = int(pool_bytes // report.kv_bytes_per_token[dtype])
    report.max_context_here = _longest_context(report, num_tokens)
    if num_tokens < 1:
        flags = next((mode.flags for mode in report.modes if mode.name == report.best_mode), "")
        raise ModelError(
            f"{report.name}: the weights take {weight_bytes / 2**20:.0f} MiB in"
            f" {report.quantization or dtype}, which does"
            " not leave memory for a KV pool; take "
            + (f"{flags}, a smaller model" if flags else "a smaller model")
            + " or free memory"
        )
