"""The flags of `bench.serving` that say what comes out of a run."""

import math
from argparse import Namespace
from datetime import datetime
from pathlib import Path
from typing import Any

from quadriga.config.flags import flag_name
from quadriga.errors import ConfigError

PICTURES = (".png", ".svg", ".pdf")
FILES = ("json", "output_file", "plot", "save_trace", "server_log")


def add_output(group: Any) -> None:
    """Add them to a parser."""
    group.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    group.add_argument("--details", action="store_true", help="and the record of every request")
    group.add_argument(
        "--output-file",
        type=Path,
        metavar="FILE.jsonl",
        help="append each run there, a JSON object a line with the keys that the bench clients of"
        " SGLang and vLLM write",
    )
    group.add_argument(
        "--save-result",
        action="store_true",
        help="the same, into a file here that is named after backend, rate, model and time",
    )
    group.add_argument(
        "--output-details",
        "--save-detailed",
        action="store_true",
        help="and lengths, times and errors of every request",
    )
    group.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the first measured run")
    group.add_argument(
        "--save-trace",
        type=Path,
        metavar="FILE",
        help="write what the first measured run sent; --trace sends it again, with the same --seed",
    )
    add_goodput(group)
    group.add_argument(
        "--server-log",
        type=Path,
        metavar="FILE",
        help="log of the bench's own server (default: its standard error)",
    )


def add_goodput(group: Any) -> None:
    """The limits that bench.metrics.metrics.Slo reads."""
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="requests that keep these count as good: ttft:200 tpot:30 e2el:5000, any of them",
    )


def check_files(arguments: Namespace) -> None:
    """ConfigError where a file could not be written in the end."""
    for name in FILES:
        path = getattr(arguments, name)
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{flag_name(name)} {path}: there is no directory {path.parent}")
    if arguments.plot is not None and arguments.plot.suffix not in PICTURES:
        raise ConfigError(f"--plot {arguments.plot}: it must end in {', '.join(PICTURES)}")


def result_file(arguments: Namespace) -> Path | None:
    """Where the runs are appended, if anywhere."""
    if arguments.save_result:
        model = getattr(arguments, "model", "").rstrip("/").rsplit("/", 1)[-1] or "model"
        rate = f"{arguments.request_rate:g}qps" if arguments.request_rate < math.inf else "infqps"
        return Path(f"{arguments.backend}-{rate}-{model}-{datetime.now():%Y%m%d-%H%M%S}.json")
    return arguments.output_file
