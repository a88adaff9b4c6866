"""The worker reads an adapter's files once for as long as the adapter is in its memory."""

from queue import Queue

import pytest

from quadriga.errors import ModelError
from quadriga.wire.adapter import AdapterRef
from quadriga.wire.worker import AdapterReady, LoadAdapter
from worker_proc.adapters.change import Adapter
from worker_proc.adapters.loader import AdapterLoader


class LoaderBench:
    """A loader whose files and engine are these lists.

    Attributes:
        read: names of the adapters that were read from files.
        uploaded: what was copied to the device.
        engine: the adapters by their places.
        broken: names of adapters that cannot be read.
    """

    def __init__(self) -> None:
        self.read: list[str] = []
        self.uploaded: list[Adapter] = []
        self.engine: dict[int, Adapter | None] = {}
        self.broken: set[str] = set()
        self._answers = Queue[AdapterReady]()
        self.loader = AdapterLoader(
            self._read, self._upload, self.engine.__setitem__, self._answers.put
        )

    def _read(self, adapter: AdapterRef) -> Adapter:
        if adapter.name in self.broken:
            raise ModelError(f"{adapter.name} is broken")
        self.read.append(adapter.name)
        return Adapter({})

    def _upload(self, packed: Adapter) -> Adapter:
        self.uploaded.append(packed)
        return Adapter({})

    def load(self, name: str, place: int) -> AdapterReady:
        self.loader.load(LoadAdapter(AdapterRef(f"id of {name}", name), place))
        ready = self._answers.get(timeout=10)
        if not ready.error:
            self.loader.take({place})
        return ready


def test_files_are_read_once_until_the_adapter_leaves_the_memory() -> None:
    bench = LoaderBench()
    ready = bench.load("a", 0)
    assert (ready.id, ready.place, ready.error) == ("id of a", 0, "")
    first = bench.engine[0]
    assert first is not None
    bench.loader.forget(0)
    assert bench.engine[0] is None
    bench.load("a", 1)
    assert bench.read == ["a"]
    assert len(bench.uploaded) == 2 and bench.uploaded[0] is bench.uploaded[1]
    assert bench.engine[1] is not None and bench.engine[1] is not first
    bench.loader.forget(1)
    bench.loader.evict("id of a")
    bench.load("a", 0)
    assert bench.read == ["a", "a"]
    bench.loader.forget_all()
    assert bench.engine == {0: None, 1: None}
    bench.load("a", 0)
    assert bench.read == ["a", "a", "a"]


def test_what_cannot_be_read_is_tried_again_once_it_has_left_the_memory() -> None:
    bench = LoaderBench()
    bench.broken = {"a"}
    assert bench.load("a", 0).error == "a is broken"
    with pytest.raises(ModelError, match="a is broken"):
        bench.loader.take({0})
    bench.loader.evict("id of a")
    bench.broken = set()
    assert bench.load("a", 0).error == "" and bench.engine[0] is not None
