"""Write the JSON file of a whole bench, and append runs to a file of JSON lines."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench.cli.options import Options
from bench.metrics.metrics import Summary
from bench.report.report import Result
from quadriga.errors import ConfigError


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def append_json(path: Path, documents: Sequence[Mapping[str, Any]]) -> None:
    """Append each document as a line."""
    with path.open("a") as file:
        file.writelines(json.dumps(document) + "\n" for document in documents)


def write_json(
    path: Path,
    options: Options,
    info: Mapping[str, Any],
    results: Sequence[Result],
    warmups: Sequence[Summary],
) -> None:
    """Write all figures, with flags and info of the server. Times are those of the dataclasses."""
    config = options.target.config
    document = {
        "date": now(),
        "flags": options.flags,
        "server_flags": None if config is None else dataclasses.asdict(config),
        "server_info": dict(info),
        "warmups": [dataclasses.asdict(summary) for summary in warmups],
        "runs": [_run_as_dict(result, options.output.details) for result in results],
    }
    path.write_text(json.dumps(document, indent=2) + "\n")


def _run_as_dict(result: Result, details: bool) -> dict[str, Any]:
    run: dict[str, Any] = {
        "summary": dataclasses.asdict(result.summary),
        "cost": dataclasses.asdict(result.cost),
        "server_info": dict(result.info),
    }
    if details:
        run["records"] = [dataclasses.asdict(record) for record in result.records]
    return run


def read_runs(path: Path) -> list[dict[str, Any]]:
    """Return the runs of a file that `write_json` wrote, or raise ConfigError."""
    try:
        runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no result of bench.serving --json: {error!r}") from None
    return runs
