"""Counters of the KV pages beyond the pool."""

from dataclasses import dataclass

from quadriga.wire.messages.to_client import InfoValues


@dataclass(slots=True)
class OffloadStats:
    """Totals since start, beyond restarts of the worker.

    Attributes:
        loads: transfers from the tiers to the pool.
        loaded_tokens: tokens whose keys and values were loaded.
        load_seconds: duration of the loads.
        stored_pages: pages that the tiers have taken in.
        missed_pages: pages at which a load ended early, because they were not there any more.
        damaged_pages: pages whose file was not what was written.
        disk_failed: whether the disk takes no pages at present.
    """

    loads: int = 0
    loaded_tokens: int = 0
    load_seconds: float = 0.0
    stored_pages: int = 0
    missed_pages: int = 0
    damaged_pages: int = 0
    disk_failed: bool = False

    def info(self, num_pages: int) -> InfoValues:
        """Return the values of the server info.

        Args:
            num_pages: Pages in the tiers, or on their way there.
        """
        return {
            "kv_offload_pages": num_pages,
            "kv_offload_disk_failed": int(self.disk_failed),
            "kv_offload_loads_total": self.loads,
            "kv_offload_loaded_tokens_total": self.loaded_tokens,
            "kv_offload_load_seconds_total": self.load_seconds,
            "kv_offload_stored_pages_total": self.stored_pages,
            "kv_offload_missed_pages_total": self.missed_pages,
            "kv_offload_damaged_pages_total": self.damaged_pages,
        }
