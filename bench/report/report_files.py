"""The JSON file of a whole bench, and the lines that are added to another one."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench.cli.options import Options
from bench.metrics.metrics import Summary
from bench.report.report import Result


def now() -> str:
    """In UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def append_json(path: Path, documents: Sequence[Mapping[str, Any]]) -> None:
    """Each as one line at the end of the file."""
    with path.open("a") as file:
        file.writelines(json.dumps(document) + "\n" for document in documents)


def write_json(
    path: Path,
    options: Options,
    info: Mapping[str, Any],
    results: Sequence[Result],
    warmups: Sequence[Summary],
) -> None:
    """Everything that was measured, with what it was measured on. Times as in the dataclasses."""
    document = {
        "date": now(),
        "flags": options.flags,
        "server_flags": dataclasses.asdict(options.server) if options.server else None,
        "server_info": dict(info),
        "warmups": [dataclasses.asdict(summary) for summary in warmups],
        "runs": [_run_as_dict(result, options.details) for result in results],
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
