"""Gives the KV pages of this replica to replicas on other machines, in a thread beside the steps.

The pages are those in shared memory, sent as they are: the receiver checks them. What a receiver
has asked for is all that is held for it.
"""

import threading
from collections.abc import Callable, Mapping
from itertools import islice

from quadriga.server.prefix_blocks import PAGE_HASH_BYTES, split_hashes
from quadriga.wire.links import NodeLinks
from quadriga.wire.page_link import (
    MAX_PAGES_ASKED,
    AnsweringLink,
    FindPages,
    OpenPages,
    PageSent,
    PagesFound,
    PagesOpened,
    Question,
    SendPages,
)
from worker_proc.kv_tiers.shared_pages import SharedReader

CLOSE_POLL_S = 0.2


class PageServer:
    """Answers the questions of other replicas.

    Args:
        links: where it receives them.
        pages: what it gives.
        facts: what the pages are.
        on_error: called in the thread where it cannot go on, while the exception is handled.
    """

    def __init__(
        self,
        links: NodeLinks,
        pages: SharedReader,
        facts: Mapping[str, str],
        on_error: Callable[[], object],
    ) -> None:
        self._pages = pages
        self._facts = dict(facts)
        self._on_error = on_error
        self._is_closed = False
        self._link = AnsweringLink(links)
        self._thread = threading.Thread(target=self._run, name="kv pages", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._is_closed = True
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_closed:
                received = self._link.receive(CLOSE_POLL_S)
                if received is not None:
                    self._answer(*received)
            self._link.close()
        except BaseException:  # other replicas would find none of the pages any more
            self._on_error()
            raise

    def _answer(self, sender: bytes, question: Question) -> None:
        match question:
            case OpenPages():
                self._link.send(sender, PagesOpened(question.attempt, self._facts))
            case FindPages():
                names = split_hashes(question.names, PAGE_HASH_BYTES)
                flags = bytes(name in self._pages for name in names)
                self._link.send(sender, PagesFound(question.load, flags))
            case SendPages():
                names = split_hashes(question.names, PAGE_HASH_BYTES)
                for name in islice(names, MAX_PAGES_ASKED):
                    self._send(sender, question.load, name)

    def _send(self, receiver: bytes, load: int, name: bytes) -> None:
        found = self._pages.copy(name)
        if found is None:  # it made room for another page
            self._link.send(receiver, PageSent(load, name))
        else:
            digest, page = found
            self._link.send(receiver, PageSent(load, name, digest), page)
