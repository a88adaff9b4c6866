"""The pages of the KV pool, by number. Where they lie in memory is the worker's business."""


class PagePool:
    """Free pages and how many are held. Pages are numbered 0 to num_pages - 1.

    Invariant, checked by `check`: free + held = all. The prefix tree will add `cached`.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self.num_held = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self.page_size)

    def take(self, count: int) -> list[int]:
        """`count` free pages, which must be there: ask `num_free` first."""
        if count > len(self._free):
            raise ValueError(f"{count} pages asked for, {len(self._free)} are free")
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        self.num_held += count
        return taken

    def give_back(self, pages: list[int]) -> None:
        """Return pages that `take` gave."""
        self._free += pages
        self.num_held -= len(pages)

    def check(self) -> None:
        """Raise AssertionError where a page is lost or free twice."""
        assert self.num_free + self.num_held == self.num_pages, (
            f"{self.num_free} free + {self.num_held} held pages are not {self.num_pages}"
        )
        assert len(set(self._free)) == self.num_free, "a page is free twice"
