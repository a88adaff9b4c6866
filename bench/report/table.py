"""Tables in markdown, and rows of figures as lines of JSON."""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; each row has as many cells as the header."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


Value = str | int | float | None
FigureRow = Mapping[str, Value]


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="append the figures to a file, a line for each row",
    )


def show(title: str, rows: Sequence[FigureRow], file: Path | None) -> None:
    """Print rows as a table below a title, and append them to a file."""
    print(f"{title}\n\n{table_of(rows)}\n", flush=True)
    if file is not None:
        with file.open("a") as lines:
            lines.writelines(json.dumps({"table": title, **row}) + "\n" for row in rows)


def table_of(rows: Sequence[FigureRow]) -> str:
    """Return rows as a table in markdown; a value that a row lacks is a dash."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return markdown_table(names, [[_shown(row.get(name)) for name in names] for row in rows])


def _shown(value: Value) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
