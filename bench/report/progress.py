"""Progress of a run: a bar on a terminal, a line every few seconds elsewhere."""

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    from typing_extensions import Self

LINE_INTERVAL_S = 10.0


class Progress:
    """Progress of `total` requests on standard error; `update` counts one of them."""

    def __init__(self, total: int, title: str, line_interval_s: float = LINE_INTERVAL_S) -> None:
        self._total = total
        self._title = title
        self._interval_s = line_interval_s
        self._done = 0
        self._began_at = self._shown_at = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty():
            self._bar = tqdm(total=total, desc=title, unit="req", leave=False)

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self) -> None:
        """Count one request, and show the progress if it is due."""
        self._done += 1
        if self._bar is not None:
            self._bar.update()
            return
        now = time.monotonic()
        if now - self._shown_at >= self._interval_s and self._done < self._total:
            self._shown_at = now
            seconds = now - self._began_at
            print(
                f"{self._title}: {self._done} of {self._total} requests after {seconds:.0f} s",
                file=sys.stderr,
                flush=True,
            )
