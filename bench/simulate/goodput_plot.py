"""Draw the goodput of several tables of `--vary`: `python -m bench.simulate.goodput_plot`.

Each file is what `python -m bench.simulate --vary ... --json FILE` has written, with a row "mixed",
a row "auto", and rows such as "2 apart"; others are not drawn. The files of one label share a
panel, in the order in which they are given. Needs matplotlib.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl

from bench.report import plots

# The names of rows: the ends of those with a fixed number of replicas for prompts.
MIXED, AUTO, FIXED = "mixed", "auto", " apart"
# Color, marker, title, and how far beside the others it is drawn.
STYLES = {
    MIXED: (plots.FILL, "s", "all mixed", -0.15),
    AUTO: ("#d9822b", "D", "auto", 0.15),
}


class GoodputColumn(NamedTuple):
    """The goodput of the rows of a table, in percent.

    Attributes:
        panel: label of the panel.
        replicas: number of replicas.
        goodput: by the name of the row.
    """

    panel: str
    replicas: int
    goodput: dict[str, float]


def read_column(text: str) -> GoodputColumn:
    """Read LABEL=FILE."""
    panel, _, name = text.partition("=")
    rows = [json.loads(line) for line in Path(name).read_text().splitlines()]
    replicas = int(rows[0]["table"].split()[0])
    return GoodputColumn(panel, replicas, {row[""]: row["goodput, %"] for row in rows})


def draw(columns: Sequence[GoodputColumn], path: Path) -> None:
    """Draw a panel for each label, with a place for each column, and write the file."""
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "quadriga"}
    panels = list(dict.fromkeys(column.panel for column in columns))
    figure = plots.new_figure([], width=9, height=3.6)
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, panel in zip(all_axes, panels, strict=True):
        _draw_panel(axes, [column for column in columns if column.panel == panel])
        plots.label(axes, panel, "replicas", "")
        axes.get_legend().remove()
    all_axes[0].set_ylabel("requests within their targets, %")
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, metadata={"Date": None})


def _draw_panel(axes: Any, columns: Sequence[GoodputColumn]) -> None:
    places = range(len(columns))
    fixed = [
        (place, value)
        for place, column in zip(places, columns, strict=True)
        for name, value in column.goodput.items()
        if name.endswith(FIXED)
    ]
    marks = [place for place, _ in fixed], [value for _, value in fixed]
    axes.plot(*marks, "o", color=plots.MUTED, markeredgecolor=plots.DARK,
        markersize=6, label="one to six of eight for prompts")  # fmt: skip
    for name, (color, marker, title, beside) in STYLES.items():
        values = [column.goodput[name] for column in columns]
        drawn = [place + beside for place in places]
        axes.plot(drawn, values, marker, color=color, markersize=7, label=title)
    axes.set_xticks(places, [str(column.replicas) for column in columns])
    axes.set_xlim(-0.5, len(columns) - 0.5)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the plot of a command line."""
    parser = argparse.ArgumentParser("bench.simulate.goodput_plot", description=__doc__)
    parser.add_argument("columns", nargs="+", metavar="LABEL=FILE")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.svg")
    arguments = parser.parse_args(argv)
    columns = [read_column(text) for text in arguments.columns]
    for column in columns:
        if missing := STYLES.keys() - column.goodput.keys():
            parser.error(f"{column.panel}, {column.replicas} replicas: no row {min(missing)}")
    draw(columns, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
