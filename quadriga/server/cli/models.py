"""`quadriga models` and `quadriga models check MODEL`."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from quadriga.errors import ConfigError
from quadriga.programs import install_command
from quadriga.server.cli.shared import add_server

NAME = "models"
HELP = "list the models of this machine; models check MODEL: whether a server can serve one"
EXIT_NOT_SERVABLE = 1


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    add_server(parser)
    check = parser.add_subparsers(title="commands").add_parser(
        "check",
        help="whether a server can serve a model, and in which memory; exit code 1: it cannot",
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
    from quadriga.server.cli.model_listing import local_models, served_model

    models = local_models()
    if served := served_model(arguments.endpoint, arguments.curve_dir):
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
    if not report.is_servable:
        sys.exit(EXIT_NOT_SERVABLE)


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
