"""scheduler_proc ⇄ worker_proc: KV pages that are copied to the tiers beyond the pool, and back."""

import msgspec

# --- scheduler_proc -> worker_proc ----------------------------------------------------------------


class StorePages(msgspec.Struct, tag="store", array_like=True, frozen=True):
    """Copy pages of the pool to the tiers beyond it, in parallel to the steps.

    Earlier plans have computed them. A page that a later plan writes to before it is copied is not
    stored. Each page is answered in StoredPages.

    Attributes:
        pages: int32 bytes.
        hashes: PAGE_HASH_BYTES for each page.
    """

    pages: bytes
    hashes: bytes


class LoadPages(msgspec.Struct, tag="load", array_like=True, frozen=True):
    """Copy pages from the tiers to the pool, in parallel to the steps; answered by PagesLoaded.

    No plan uses these pages until then.

    Attributes:
        load: number of the load.
        pages: int32 bytes.
        hashes: PAGE_HASH_BYTES for each page.
    """

    load: int
    pages: bytes
    hashes: bytes


# --- worker_proc -> scheduler_proc ----------------------------------------------------------------


class StoredPages(msgspec.Struct, tag="stored", array_like=True, frozen=True):
    """Which pages can be loaded from the tiers, beyond what was said before.

    Attributes:
        added: PAGE_HASH_BYTES for each page that can be loaded from now on.
        removed: for each that cannot, or that was not stored.
        num_damaged: pages among `removed` whose file was not what was written.
        disk_failed: whether the disk takes no pages at present.
    """

    added: bytes
    removed: bytes
    session: int = 0
    num_damaged: int = 0
    disk_failed: bool = False


class PagesLoaded(msgspec.Struct, tag="loaded", array_like=True, frozen=True):
    """The first pages of a load are in the pool; the others were not found.

    Attributes:
        seconds: from the beginning of the load to its end.
    """

    load: int
    num_loaded: int
    session: int = 0
    seconds: float = 0.0
