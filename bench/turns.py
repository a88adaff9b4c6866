"""What experiments have in common: variants take turns with a load, and a table compares them.

A variant is `"NAME: FLAGS"`, or `"NAME: @DIR FLAGS"` for another checkout of the project. An
experiment gives each variant its turn in the order A B, B A, A B, so that a slow minute of the
machine affects all of them, and takes ratios turn by turn.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from bench.cli.command import named_flags
from bench.client.server import LAUNCHER, config_of
from bench.report.table import markdown_table
from quadriga.errors import ConfigError
from quadriga.server.config.server_config import ServerConfig

R = TypeVar("R")
CHECKOUT = "@"  # before the directory of another checkout
VARIANTS_HELP = '"NAME: FLAGS", or "NAME: @DIR FLAGS" for another checkout'


@dataclass(frozen=True, slots=True)
class Variant:
    """What is compared: flags, of this checkout or another one."""

    name: str
    flags: list[str] = field(default_factory=list)
    launcher: Path = LAUNCHER

    @property
    def checkout(self) -> Path:
        """The directory of the checkout."""
        return self.launcher.parent

    def config(self, common: Sequence[str]) -> ServerConfig:
        """Return the server's configuration: common flags, then those of the variant."""
        return config_of([*common, *self.flags], f"the server of {self.name!r}")


def variant_of(text: str) -> Variant:
    """Return the variant of "NAME: FLAGS" or "NAME: @DIR FLAGS", or raise ConfigError."""
    name, words = named_flags(text)
    launcher = LAUNCHER
    for word in words:
        if word.startswith(CHECKOUT):
            launcher = Path(word[1:]).resolve() / LAUNCHER.name
    if not launcher.is_file():
        raise ConfigError(f"there is no {launcher}: {CHECKOUT}DIR is the directory of a checkout")
    return Variant(name, [w for w in words if not w.startswith(CHECKOUT)], launcher)


def split_common(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return what is before `--`, and behind it: the flags of all variants."""
    end = argv.index("--") if "--" in argv else len(argv)
    return list(argv[:end]), list(argv[end + 1 :])


@dataclass(frozen=True, slots=True)
class Ratios:
    """A figure of one variant over that of another, turn by turn."""

    values: Sequence[float]

    @property
    def median(self) -> float:
        """The median over the turns."""
        return statistics.median(self.values)

    def __str__(self) -> str:
        return f"{self.median:.2f} ({min(self.values):.2f} to {max(self.values):.2f})"


@dataclass(frozen=True, slots=True)
class Column(Generic[R]):
    """A figure of a turn, shown with `places` digits after the point, or as a ratio, too."""

    title: str
    value: Callable[[R], float | None]
    places: int = 0
    has_ratio: bool = False


class Turns(Generic[R]):
    """The results of each variant, turn by turn; the first variant is what others are compared to.

    Attributes:
        results: by the name of the variant.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.results: dict[str, list[R]] = {name: [] for name in names}

    def order(
        self, num_turns: int, max_seconds: float = math.inf, note: str = ""
    ) -> Iterator[tuple[int, str]]:
        """Yield the number of each turn and whose it is.

        Args:
            num_turns: the number of turns that each variant has.
            max_seconds: no turn begins that would end later; the first one always does.
            note: what is measured, for a line of progress; "": none.
        """
        began_at = time.perf_counter()
        for turn in range(num_turns):
            names = list(self.results)
            for name in reversed(names) if turn % 2 else names:
                if note:
                    print(f"{note}, turn {turn + 1}: {name}", file=sys.stderr, flush=True)
                yield turn, name
            took_s = time.perf_counter() - began_at
            if took_s * (turn + 2) / (turn + 1) > max_seconds:
                return

    def ratios(self, name: str, value: Callable[[R], float | None]) -> Ratios | None:
        """Return a figure of a variant over that of the first one; None if it is unknown."""
        first = next(iter(self.results.values()))
        pairs = [(value(r), value(base)) for r, base in zip(self.results[name], first, strict=True)]
        known = [ours / base for ours, base in pairs if ours is not None and base]
        return Ratios(known) if known else None

    def median(self, name: str, value: Callable[[R], float | None]) -> float | None:
        """Return the median of a figure of a variant; None if it is unknown."""
        known = [found for result in self.results[name] if (found := value(result)) is not None]
        return statistics.median(known) if known else None

    def table(self, columns: Sequence[Column[R]], corner: str = "median of the turns") -> str:
        """Return the medians in markdown: a row for each figure, a column for each variant."""
        rows = [[c.title, *(self._cell(name, c) for name in self.results)] for c in columns]
        return markdown_table([corner, *self.results], rows)

    def _cell(self, name: str, column: Column[R]) -> str:
        median = self.median(name, column.value)
        if median is None:
            return "n/a"
        text = f"{median:.{column.places}f}"
        is_first = name == next(iter(self.results))
        ratios = None if is_first or not column.has_ratio else self.ratios(name, column.value)
        return text if ratios is None else f"{text}, {ratios} x"
