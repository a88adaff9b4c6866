"""Change KV pages in shared memory, as a fault would."""

from pathlib import Path

from worker_proc.kv_tiers.shared_pages import ENTRY, HEADER, FileLayout


def _entries(path: Path, first: int, step: int) -> tuple[bytearray, FileLayout, list[int]]:
    """Return a file, its layout, and the places of some of its pages."""
    content = bytearray(path.read_bytes())
    _magic, namespace, page_bytes, num_places = HEADER.unpack(content[: HEADER.size])
    layout = FileLayout(namespace, page_bytes, num_places)
    used = []
    for place in range(num_places):
        begin = layout.entry(place)
        if any(content[begin : begin + ENTRY.size]):
            used.append(place)
    return content, layout, used[first::step]


def damage_pages(path: Path, first: int = 0, step: int = 1) -> int:
    """Change the last byte of pages: every `step`th from the `first` on. Return their number."""
    content, layout, places = _entries(path, first, step)
    with path.open("r+b") as file:
        for place in places:
            last = layout.place(place) + layout.page_bytes - 1
            file.seek(last)
            file.write(bytes([content[last] ^ 1]))
    return len(places)


def forget_pages(path: Path, first: int = 0, step: int = 1) -> int:
    """Remove the names of pages, as in `damage_pages`. Return their number."""
    _content, layout, places = _entries(path, first, step)
    with path.open("r+b") as file:
        for place in places:
            file.seek(layout.entry(place))
            file.write(bytes(ENTRY.size))
    return len(places)
