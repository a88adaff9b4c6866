"""Sliding windows: the tokens that a layer's attention is limited to, and the pages of these."""

from collections.abc import Iterable

Windows = tuple[int | None, ...]


def common_window(windows: Iterable[int | None]) -> int:
    """Return the tokens that every layer's attention is limited to; 0 if a layer sees all.

    Args:
        windows: the window of each layer, in tokens; None: the layer sees all.
    """
    known = list(windows)
    return max((window or 0 for window in known), default=0) if all(known) else 0


def num_seen_pages(window: int, page_size: int) -> int:
    """Return the number of KV pages before its own that the first token of a page sees.

    It is at least 1, as the prefix tree needs the page before as a parent.
    """
    return max(1, -(-(window - 1) // page_size))
