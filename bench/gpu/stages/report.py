"""What came of the stages of bench.gpu.all: a line of JSON for each, and a report."""

import json
import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.gpu.stages.stages import Stage
from bench.report.figures import table_of
from bench.report.markdown import markdown_table

NUM_LOG_LINES = 25


class StageOutcome(Enum):
    """How a stage ended; the value is its name in the report."""

    PASSED = "passed"
    FAILED = "failed"
    STOPPED = "stopped at its limit"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class StageResult:
    """A stage that has ended.

    Attributes:
        log: Its output.
        figures: What it wrote as JSON, an object for each row or run.
    """

    stage: Stage
    outcome: StageOutcome
    seconds: float
    log: Path
    figures: list[dict[str, Any]]


def read_figures(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file: JSON lines, or one object; none if it was not written.

    The last line of a stage that was stopped may be incomplete, and is left out.
    """
    if not path.is_file():
        return []
    text, figures = path.read_text(), []
    try:
        return [json.loads(text)]
    except json.JSONDecodeError:
        for line in text.splitlines():
            with suppress(json.JSONDecodeError):
                figures.append(json.loads(line))
    return figures


def append_line(path: Path, result: StageResult) -> None:
    """Append a stage to a file, as a line of JSON."""
    line = {
        "stage": result.stage.name,
        "outcome": result.outcome.value,
        "seconds": round(result.seconds, 1),
        "command": shlex.join(result.stage.command),
        "missing": result.stage.missing,
        "figures": result.figures,
    }
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def write_report(path: Path, results: Sequence[StageResult], device: str) -> None:
    """Write all stages so far: how they ended, and a section for each."""
    rows = [
        [result.stage.name, result.outcome.value, f"{result.seconds:.0f}"] for result in results
    ]
    head = f"# Measurements on {device}, {time.strftime('%Y-%m-%d %H:%M %Z')}"
    parts = [head, markdown_table(["stage", "outcome", "seconds"], rows)]
    parts += [_section(result) for result in results]
    path.write_text("\n\n".join(parts) + "\n")


def _section(result: StageResult) -> str:
    parts = [f"## {result.stage.name}", f"    {shlex.join(result.stage.command)}"]
    tables = [row for row in result.figures if "table" in row]
    if result.outcome is StageOutcome.PASSED and tables:
        for title, rows in groupby(tables, lambda row: row["table"]):
            shown = [{key: row[key] for key in row if key != "table"} for row in rows]
            parts += [str(title), table_of(shown)]
    else:
        last = result.log.read_text(errors="replace").splitlines()[-NUM_LOG_LINES:]
        parts.append("\n".join(["```", *last, "```"]))
    return "\n\n".join(parts)
