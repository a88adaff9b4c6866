"""What happens in the prefix tree, as events for routers.

A page of the tree is a block of the events. Only what requests can match is announced. Routers
compare prompts with caches by the hashes of blocks, vLLM's `sha256_cbor`: the SHA-256 of the
canonical CBOR (RFC 8949, section 4.2.1) of the array [hash of the block before, token ids, extra
keys or null]. Before the first block stands the hash of a seed, which vLLM takes from the variable
PYTHONHASHSEED.
"""

import os
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256

from quadriga.server.prefix_blocks import TOKEN_BYTES
from quadriga.wire.kv_events import MEDIUM, AllBlocksCleared, BlockRemoved, BlockStored, Event
from scheduler_proc.state.kv_cache import KVCache
from scheduler_proc.state.prefix_tree import Node

DEFAULT_SEED = "0"
_BEFORE_PARENT = b"\x83\x58\x20"  # an array of 3 items, of which the first has 32 bytes
_NULL = b"\xf6"
_UNSIGNED, _TEXT, _ARRAY = 0, 3, 4  # major types of CBOR


def root_hash() -> bytes:
    """Return what stands for the hash of the block before the first one."""
    return sha256(_text(os.environ.get("PYTHONHASHSEED", DEFAULT_SEED))).digest()


def block_hash(
    parent: bytes, token_ids: Sequence[int], extra_keys: tuple[str, ...] | None
) -> bytes:
    """Return the hash of a block.

    Args:
        parent: hash of the block before it, or `root_hash`.
        token_ids: of the block.
        extra_keys: the adapter's name, and of the first block the cache salt; None: neither.
    """
    parts = [_BEFORE_PARENT, parent, _head(_ARRAY, len(token_ids))]
    parts += map(_unsigned, token_ids)
    if extra_keys is None:
        parts.append(_NULL)
    else:
        parts += [_head(_ARRAY, len(extra_keys)), *map(_text, extra_keys)]
    return sha256(b"".join(parts)).digest()


@lru_cache(1 << 18)
def _unsigned(value: int) -> bytes:
    return _head(_UNSIGNED, value)


def _text(text: str) -> bytes:
    encoded = text.encode()
    return _head(_TEXT, len(encoded)) + encoded


def _head(major: int, value: int) -> bytes:
    """Return a type and a number in as few bytes as possible."""
    if value < 24:
        return bytes([major << 5 | value])
    for power in range(3):
        if value < 1 << (8 << power):
            return bytes([major << 5 | 24 + power]) + value.to_bytes(1 << power, "big")
    return bytes([major << 5 | 27]) + value.to_bytes(8, "big")


@dataclass(slots=True, eq=False)
class _Block:
    """A node of the tree.

    Attributes:
        hash: of the block.
        parent: hash of the block before it; None: it is the first one.
        adapter: name of the adapter; None: the model itself.
        extra_keys: what the hash covers beside the tokens.
        is_present: it has a page that requests can match.
    """

    hash: bytes
    parent: bytes | None
    adapter: str | None
    extra_keys: tuple[str, ...] | None
    is_present: bool = False


class TreeEvents:
    """Gather the events of a pool's prefix tree. It is an observer of the tree.

    Two nodes may have one hash, if an adapter was replaced under its name: such a block is removed
    with the last of them.

    Args:
        root: stands for the hash of the block before the first one.
        adapter_name: returns the name of a loaded adapter by its id; None for another text.
    """

    def __init__(self, root: bytes, adapter_name: Callable[[str], str | None]) -> None:
        self._root = root
        self._adapter_name = adapter_name
        self._page_size = 0
        self._blocks: dict[Node, _Block] = {}
        self._num_present: dict[bytes, int] = {}
        self._hidden: set[Node] = set()
        self._adapter_numbers: dict[str, int] = {}
        self._events: list[Event] = []

    def watch(self, kv: KVCache) -> None:
        """Begin with a new, empty pool."""
        self._page_size = kv.page_size
        self._blocks, self._num_present, self._hidden = {}, {}, set()
        self._events = [AllBlocksCleared()]
        kv.tree.observers.append(self)

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        if not self._num_present and any(isinstance(event, BlockRemoved) for event in events):
            return [AllBlocksCleared()]
        return events

    def restate(self) -> None:
        """Let the next events be those that lead from any state to the present one."""
        self._events = [AllBlocksCleared()]
        stated = set()
        for node, block in self._blocks.items():
            if block.is_present and block.hash not in stated:
                stated.add(block.hash)
                self._on_stored(node, block)

    # --- observer of the tree ---------------------------------------------------------------------

    def add(self, node: Node) -> None:
        """Take in that a node has a page."""
        parent = node.parent
        assert parent is not None
        if not (node.is_shared and parent.is_shared) or parent in self._hidden:
            self._hidden.add(node)  # no request can match what lies below a withdrawn node
            return
        block = self._blocks.get(node)
        if block is None:
            block = self._blocks[node] = self._block_of(node, self._blocks.get(parent))
        block.is_present = True
        count = self._num_present[block.hash] = self._num_present.get(block.hash, 0) + 1
        if count == 1:
            self._on_stored(node, block)

    def evict(self, node: Node) -> None:
        """Take in that a node has lost its page, or that requests may not match it any more."""
        block = self._blocks.get(node)
        if block is None or not block.is_present:
            return
        block.is_present = False
        self._num_present[block.hash] -= 1
        if self._num_present[block.hash] == 0:
            del self._num_present[block.hash]
            self._on_removed(block)

    def forget(self, node: Node) -> None:
        """Take in that a node has left the tree."""
        self._blocks.pop(node, None)
        self._hidden.discard(node)

    # --- blocks and events ------------------------------------------------------------------------

    def _block_of(self, node: Node, parent: _Block | None) -> _Block:
        salt: tuple[str, ...] = ()
        if parent is None:
            adapter, own_salt = self._split(node.key[: -self._page_size * TOKEN_BYTES].decode())
            salt = (own_salt,) if own_salt else ()
        else:
            adapter = parent.adapter
        extra_keys = (*([adapter] if adapter is not None else []), *salt) or None
        before = self._root if parent is None else parent.hash
        found = block_hash(before, self._token_ids(node), extra_keys)
        return _Block(found, None if parent is None else parent.hash, adapter, extra_keys)

    def _split(self, salt: str) -> tuple[str | None, str]:
        """Return the adapter's name and the cache salt that are in what keeps pages apart.

        A request's own salt follows the tenant, which is empty where tenants share pages.
        """
        adapter_id, separator, rest = salt.partition("\0")
        name = self._adapter_name(adapter_id) if separator else None
        return name, (salt if name is None else rest).removeprefix("\0")

    def _token_ids(self, node: Node) -> list[int]:
        return array("i", node.key[-self._page_size * TOKEN_BYTES :]).tolist()

    def _on_stored(self, node: Node, block: _Block) -> None:
        token_ids = self._token_ids(node)
        last = self._events[-1] if self._events else None
        if (
            isinstance(last, BlockStored)
            and block.parent == last.block_hashes[-1]
            and block.adapter == last.lora_name
        ):
            last.block_hashes.append(block.hash)
            last.token_ids += token_ids
            if last.extra_keys is not None:
                last.extra_keys.append(block.extra_keys)
            return
        number = None
        if block.adapter is not None:
            number = self._adapter_numbers.setdefault(block.adapter, len(self._adapter_numbers) + 1)
        self._events.append(
            BlockStored(
                [block.hash],
                block.parent,
                token_ids,
                self._page_size,
                number,
                MEDIUM,
                block.adapter,
                None if block.extra_keys is None else [block.extra_keys],
            )
        )

    def _on_removed(self, block: _Block) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(block.hash)
        else:
            self._events.append(BlockRemoved([block.hash], MEDIUM))
