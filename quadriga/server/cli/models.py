"""`quadriga models` and `quadriga models check MODEL`."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quadriga.client import Client
from quadriga.errors import ConfigError, ModelError, QuadrigaError
from quadriga.programs import install_command
from quadriga.server.cli.server_api import ServerApi
from quadriga.server.cli.shared import add_server, is_web_address
from quadriga.server.models.formats.directory import read_json
from quadriga.server.models.formats.gguf_reader import read_architecture_name
from quadriga.server.models.sources import (
    BUILTINS,
    BuiltinModel,
    cached_builtin_weights,
    cached_models,
)
from quadriga.server.models.weight_modes import memory_bandwidth
from quadriga.server.models.weights import weight_files
from quadriga.server.processes.machine import num_usable_cores

if TYPE_CHECKING:
    from quadriga.server.cli.model_report import ModelReport

EXIT_NOT_SERVABLE = 1
CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S = 0.5, 2.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    add_server(parser)
    check = parser.add_subparsers(title="commands").add_parser(
        "check",
        help="whether a server can serve a model, and in which memory; exit code 1: it cannot",
        description="Say whether a server can serve a model that is on this machine, and what to"
        " expect of each way to keep its weights on this machine's CPU: bytes, memory and tokens/s"
        " of one stream, estimated from the memory bandwidth, which is measured in a second."
        " No weights are read and no GPU is looked at.",
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
    if served := served_model(arguments.endpoint, arguments.curve_dir, arguments.api_key):
        models.append(served)
    if arguments.json:
        print(json.dumps([asdict(model) for model in models], indent=1))
        return
    rows = [
        (model.name, model.where, model.architecture or "-", _size(model.num_bytes))
        for model in models
    ]
    _print_table([("name", "where", "architecture", "size"), *rows])


def _check(arguments: argparse.Namespace) -> None:
    try:
        from quadriga.server.cli.model_report import check_model

        report = check_model(
            arguments.model,
            lambda: memory_bandwidth(num_usable_cores()),
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
            ("context that fits here", _count(report.max_context_here)),
            ("rope", report.rope),
            ("vocabulary", _count(report.vocab_size)),
            ("chat template", _yes_no(report.chat_template)),
            ("tokenizer", _yes_no(report.tokenizer)),
            *(("note", note) for note in report.notes),
        ]
        _print_table([row for row in rows if row[1]])
        if report.modes:
            _print_modes(report)
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
    _print_table(rows)
    print(f"best here: {best}")
    if report.memory_bandwidth is not None:
        print(
            "\nmemory and tokens/s are estimates for this machine's CPU, which reads"
            f" {report.memory_bandwidth / 1e9:.0f} GB/s (measured now):\none stream, a short"
            " context, no guessed tokens, nothing else running; the KV pool is not counted"
        )


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


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


def served_model(endpoint: str, curve_dir: str | None, api_key: str = "") -> ListedModel | None:
    """Return the model of the server at an address; None if no server answers."""
    try:
        if is_web_address(endpoint):
            return ListedModel(
                ServerApi(endpoint, api_key).models()[0]["id"], f"served at {endpoint}"
            )
        with Client(endpoint, connect_timeout=CONNECT_TIMEOUT_S, curve_dir=curve_dir) as client:
            return ListedModel(str(client.info(ANSWER_TIMEOUT_S)["model"]), f"served at {endpoint}")
    except QuadrigaError:
        return None


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
