"""The KV pages of replicas on other machines: a tier that reads them by TCP.

A load asks each replica that keeps pages which of them it has, and then for these, a window of
pages ahead of what is read. All of that is done in the thread that reads, so that no step waits.

    a replica sends nothing for SILENCE_S    its pages count as missing, in this load and in all
                                             others until it answers again, which none waits for
    LOAD_S after a load was asked for        what has not come by then counts as missing, also
                                             where it has waited behind others
    the connection breaks                    its pages count as missing at once
    its pages mean something else            none is asked for, and the log says what differs

A page that is missing ends a load, and the tokens from there on are computed.
"""

import enum
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from quadriga.wire.links import NodeLinks
from quadriga.wire.page_link import (
    MAX_PAGES_ASKED,
    Answer,
    AskingLink,
    FindPages,
    OpenPages,
    PageSent,
    PagesFound,
    PagesOpened,
    Question,
    SendPages,
    wait_for_answers,
)
from worker_proc.kv_tiers.page_copies import PageCopies, PagePlace
from worker_proc.kv_tiers.shared_pages import digest_of

SILENCE_S, LOAD_S = 2.0, 10.0
# After which a broken connection is replaced by a new one: ZeroMQ does not repair one on which it
# has received what it cannot decrypt.
RETRY_S = 3.0
# Pages that are on their way at one time, in bytes: 100 Gbit/s at 1 ms.
WINDOW_BYTES = 16 * 2**20
POLL_S = 0.1  # how late a load notices that it is not needed any more

MAX_ANSWER_BYTES = 4 * 2**20  # beside the page: which pages of a load are there

# Addresses of the replicas that keep pages, by their numbers.
Sources = Mapping[int, str]


class _State(enum.Enum):
    """What is known of a replica that keeps pages."""

    UNKNOWN = enum.auto()  # it has not said yet what its pages are
    READY = enum.auto()
    REFUSED = enum.auto()  # its pages are of another kind


class _Peer:
    """A replica that keeps pages, and what it has of a load.

    Args:
        number: of the replica.
        links: the way there.
        facts: what pages have to be.
        max_bytes: longest answer.

    Attributes:
        is_awaited: a load waits for it, SILENCE_S at most. It has not been silent lately.
        found: names of the pages of the load that it has; None: it has not said yet.
    """

    def __init__(
        self, number: int, links: NodeLinks, facts: Mapping[str, str], max_bytes: int
    ) -> None:
        self.links = links
        self.is_awaited = True
        self.found: set[bytes] | None = None
        self._number = number
        self._facts = facts
        self._max_bytes = max_bytes
        self._state = _State.UNKNOWN
        self._attempt = 0
        self._lost_at = 0.0
        self._question: FindPages | None = None
        self._names: Sequence[bytes] = ()
        self.link = AskingLink(links, max_bytes)

    def __str__(self) -> str:
        return f"replica {self._number} at {self.links.pages}"

    @property
    def is_expected_to_answer(self) -> bool:
        """Whether it has been asked which pages of the load it has, and may say so yet."""
        return self.is_awaited and self.found is None

    def begin(self, load: int, names: Sequence[bytes]) -> None:
        """Ask which pages of a load it has, now or as soon as it is known what they are."""
        self._question, self._names, self.found = FindPages(load, b"".join(names)), names, None
        if self._state is _State.READY:
            self.send(self._question)
        elif self._is_given_up:
            self._renew()

    @property
    def _is_given_up(self) -> bool:
        """Whether the connection has been broken for so long that it may never come back."""
        is_broken = self._state is _State.UNKNOWN and not self.is_awaited
        return is_broken and time.monotonic() > self._lost_at + RETRY_S

    def send(self, question: Question) -> None:
        """Send a question, unless the connection is broken."""
        if not self.link.send(question):
            self._lose()

    def receive(self) -> Iterable[tuple[PageSent, memoryview]]:
        """Take in what has come, and yield the pages of the load."""
        for is_connected in self.link.take_changes():
            self._lose()
            if is_connected:
                self._attempt += 1
                self.is_awaited = True
                self.link.send(OpenPages(self._attempt))
        while (received := self._receive()) is not None:
            answer, page = received
            match answer:
                case PagesOpened() if answer.attempt == self._attempt:
                    self._open(answer.facts)
                case PagesFound() if self._is_of_load(answer.load):
                    flags = zip(self._names, answer.flags, strict=False)
                    self.found = {name for name, is_there in flags if is_there}
                case PageSent() if self._is_of_load(answer.load):
                    yield answer, page

    def _receive(self) -> tuple[Answer, memoryview] | None:
        try:
            return self.link.receive()
        except ValueError as error:
            self.set_aside(f"sends what is no answer ({error})")
            return None

    def _is_of_load(self, load: int) -> bool:
        return self._question is not None and self._question.load == load

    def _open(self, facts: Mapping[str, str]) -> None:
        different = [
            f"{name} is {facts.get(name)} there and {self._facts.get(name)} here"
            for name in sorted({*facts, *self._facts})
            if facts.get(name) != self._facts.get(name)
        ]
        if different:
            self._state, self.is_awaited = _State.REFUSED, False
            logging.warning(
                "%s keeps KV pages of another kind, and prompts that it has computed are computed"
                " again here: %s", self, "; ".join(different),
            )  # fmt: skip
            return
        self._state, self.is_awaited = _State.READY, True
        if self._question is not None:
            self.send(self._question)

    def _lose(self) -> None:
        """Take in that the connection is broken: it has to say again what its pages are."""
        self._state, self.is_awaited, self.found = _State.UNKNOWN, False, None
        self._lost_at = time.monotonic()

    def _renew(self) -> None:
        """Replace the connection by a new one."""
        self.link.close()
        self.link = AskingLink(self.links, self._max_bytes)
        self._lose()

    def set_aside(self, why: str) -> None:
        """Replace the connection, and let no load wait for the replica until it answers again."""
        logging.warning(
            "%s %s: prompts that it has computed are computed again here until it answers",
            self, why,
        )  # fmt: skip
        self._renew()

    def close(self) -> None:
        """End the connection."""
        self.link.close()


class _ArrivedPage(NamedTuple):
    """A page as it has come, and the digest that was sent with it."""

    digest: bytes
    content: memoryview


class PeerPages:
    """The pages of the replicas on other machines. The methods are those of a PeerTier.

    Args:
        find_sources: returns the replicas that keep pages, which may change.
        key_dir: the server's key directory; "": the links have no keys.
        namespace: as of SharedPages.
        page_bytes: size of a page.
        facts: what pages have to be.
        copies: what copies pages.

    Attributes:
        num_read: number of pages that were read.
        num_damaged: number of pages that were found changed since they were written.
    """

    def __init__(
        self,
        find_sources: Callable[[], Sources],
        key_dir: str,
        namespace: bytes,
        page_bytes: int,
        facts: Mapping[str, str],
        copies: PageCopies,
    ) -> None:
        self.num_read = 0
        self.num_damaged = 0
        self._find_sources = find_sources
        self._key_dir = key_dir
        self._namespace = namespace
        self._page_bytes, self._copies = page_bytes, copies
        self._max_bytes = page_bytes + MAX_ANSWER_BYTES
        self._window = max(2, min(MAX_PAGES_ASKED, WINDOW_BYTES // page_bytes))
        self._facts = facts
        self._peers: dict[int, _Peer] = {}
        # Of the load.
        self._load = 0
        self._names: Sequence[bytes] = ()
        self._num_asked = 0  # the first ones of the names
        self._asked: dict[bytes, _Peer] = {}  # and not read yet
        self._arrived: dict[bytes, _ArrivedPage] = {}  # and not read yet
        self._is_wanted: Callable[[], bool] = lambda: False
        self._give_up_at = 0.0

    def begin(self, names: Sequence[bytes], is_wanted: Callable[[], bool], asked_at: float) -> None:
        """Ask for the first pages of a load. Wait for nothing but which pages there are."""
        self._load += 1
        self._names, self._num_asked = names, 0
        self._asked, self._arrived = {}, {}
        self._is_wanted, self._give_up_at = is_wanted, asked_at + LOAD_S
        self._update_peers()
        if not names or not self._peers:
            return
        for peer in self._peers.values():
            peer.begin(self._load, names)
        self._wait_while(lambda: any(peer.is_expected_to_answer for peer in self._peers.values()))
        for peer in self._peers.values():
            if peer.is_expected_to_answer and not self._is_over:
                peer.set_aside(f"has not said within {SILENCE_S:g} s which KV pages it has")
        self._ask_ahead()

    def read(self, name: bytes, place: PagePlace) -> bool:
        """Copy a page; return False if no replica sends it whole in time."""
        while not self._is_over and (peer := self._peer_for(name)) is not None:
            page = self._wait_for(name, peer)
            self._asked.pop(name, None)
            if page is not None and self._copy(page, name, place):
                self.num_read += 1
                self._ask_ahead()
                return True
            if page is not None and page.digest:  # without one, it is not there any more
                self.num_damaged += 1
            if peer.found is not None:
                peer.found.discard(name)
        return False

    def _copy(self, page: _ArrivedPage, name: bytes, place: PagePlace) -> bool:
        """Copy a page that has arrived. Return whether it is what was written under its name."""
        if page.content.nbytes != self._page_bytes:
            return False
        checksum = self._copies.scatter(np.frombuffer(page.content, dtype=np.uint8), place)
        return digest_of(self._namespace, name, checksum) == page.digest

    def close(self) -> None:
        """End all connections."""
        for peer in self._peers.values():
            peer.close()

    @property
    def _is_over(self) -> bool:
        """Whether the load is not needed any more, or has taken too long."""
        return not self._is_wanted() or time.monotonic() > self._give_up_at

    def _update_peers(self) -> None:
        """Connect to the replicas that are new or on another machine; forget those that left."""
        sources = self._find_sources()
        for number, peer in list(self._peers.items()):
            if sources.get(number) != peer.links.pages:
                self._peers.pop(number).close()
        for number, address in sources.items():
            if number not in self._peers:
                links = NodeLinks(pages=address, key_dir=self._key_dir)
                self._peers[number] = _Peer(number, links, self._facts, self._max_bytes)

    # --- what is asked for ------------------------------------------------------------------------

    def _peer_for(self, name: bytes) -> _Peer | None:
        """Return the replica that has been asked for a page, which may be now; None if none has."""
        peer = self._asked.get(name) or self._find_holder(name)
        if peer is not None and name not in self._asked:
            self._asked[name] = peer
            peer.send(SendPages(self._load, name))
        return peer

    def _find_holder(self, name: bytes) -> _Peer | None:
        holders = (peer for peer in self._peers.values() if peer.found and name in peer.found)
        return next(holders, None)

    def _ask_ahead(self) -> None:
        """Ask for the next pages, once half of the window has been read."""
        num_ahead = self._window - len(self._asked)
        if 2 * num_ahead < self._window:
            return
        batches: defaultdict[_Peer, list[bytes]] = defaultdict(list)
        for name in self._names[self._num_asked : self._num_asked + num_ahead]:
            if (peer := self._find_holder(name)) is None:
                break  # the load ends there
            batches[peer].append(name)
            self._asked[name] = peer
            self._num_asked += 1
        for peer, batch in batches.items():
            peer.send(SendPages(self._load, b"".join(batch)))

    # --- what comes -------------------------------------------------------------------------------

    def _wait_for(self, name: bytes, peer: _Peer) -> _ArrivedPage | None:
        """Return a page as it has come; None where its sender is gone or silent."""
        self._wait_while(lambda: name not in self._arrived and peer.found is not None, peer)
        page = self._arrived.pop(name, None)
        if page is None and peer.found is not None and not self._is_over:
            peer.set_aside(f"has sent no KV page for {SILENCE_S:g} s")
            self._forget_questions()
        return page

    def _wait_while(self, is_needed: Callable[[], bool], sender: _Peer | None = None) -> None:
        """Receive while something is needed, until nothing has come for SILENCE_S.

        Args:
            is_needed: returns whether to go on.
            sender: the replica that has to send something; None: any.
        """
        give_up_at = time.monotonic() + SILENCE_S
        while True:
            heard = self._receive()
            if heard and (sender is None or sender in heard):
                give_up_at = time.monotonic() + SILENCE_S
            now = time.monotonic()
            if not is_needed() or now > give_up_at or self._is_over:
                return
            links = [peer.link for peer in self._peers.values()]
            wait_for_answers(links, min(POLL_S, give_up_at - now))

    def _receive(self) -> set[_Peer]:
        """Take in what has come. Return the replicas that have sent pages."""
        senders = set()
        for peer in self._peers.values():
            for answer, content in peer.receive():
                self._arrived[answer.name] = _ArrivedPage(answer.digest, content)
                senders.add(peer)
        self._forget_questions()
        return senders

    def _forget_questions(self) -> None:
        """Forget what replicas were asked for that are gone; others may have it."""
        gone = [name for name, peer in self._asked.items() if peer.found is None]
        for name in gone:
            if name not in self._arrived:
                del self._asked[name]
