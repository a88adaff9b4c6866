"""The link by which replicas on different machines exchange KV pages.

A replica that needs pages connects to each of those that keep pages for others. It names what it
wants, and is sent that and nothing else, so that neither side holds more than was asked for.

    needs pages                        keeps pages
    OpenPages(attempt)          ──▶
                                ◀──    PagesOpened(attempt, facts)
    FindPages(load, names)      ──▶
                                ◀──    PagesFound(load, flags)
    SendPages(load, names)      ──▶
                                ◀──    PageSent(load, name) and the page, for each name in order

What has another number of `attempt` or `load` is an answer to an earlier question, and is dropped.
"""

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from quadriga.wire.links import NodeLinks
from quadriga.wire.sockets import LinkSocket, bind_answers, connect_questions, encode, is_readable

# Of one question. The names of a prompt of two million tokens fit into 2 MB.
MAX_QUESTION_BYTES = 4 * 2**20
# Pages of one SendPages, and so of what a slow receiver can make the sender hold.
MAX_PAGES_ASKED = 256


class OpenPages(msgspec.Struct, tag="open", array_like=True, frozen=True):
    """Ask what the pages of a replica are. attempt: a number that the answer repeats."""

    attempt: int


class PagesOpened(msgspec.Struct, tag="opened", array_like=True, frozen=True):
    """What the pages are.

    Attributes:
        attempt: as in OpenPages.
        facts: all that says what the bytes of a page mean, by name (kv_tiers/opening.py).
    """

    attempt: int
    facts: dict[str, str]


class FindPages(msgspec.Struct, tag="find", array_like=True, frozen=True):
    """Ask which pages are there.

    Attributes:
        load: a number that the answer repeats.
        names: PAGE_HASH_BYTES for each page.
    """

    load: int
    names: bytes


class PagesFound(msgspec.Struct, tag="found", array_like=True, frozen=True):
    """Which pages are there. flags: a byte for each name, 1 or 0."""

    load: int
    flags: bytes


class SendPages(msgspec.Struct, tag="send", array_like=True, frozen=True):
    """Ask for pages, MAX_PAGES_ASKED at most. The attributes are those of FindPages."""

    load: int
    names: bytes


class PageSent(msgspec.Struct, tag="sent", array_like=True, frozen=True):
    """A page, whose bytes follow in a frame of their own; none where it is not there any more.

    Attributes:
        load: as in FindPages.
        name: of the page.
        digest: that was written with it (digest_of in kv_tiers/shared_pages.py).
    """

    load: int
    name: bytes
    digest: bytes = b""


Question = OpenPages | FindPages | SendPages
Answer = PagesOpened | PagesFound | PageSent

_decode_question = msgspec.msgpack.Decoder(Question).decode
_decode_answer = msgspec.msgpack.Decoder(Answer).decode


class AnsweringLink:
    """The end of the link at the replica that keeps pages. Used by one thread.

    Args:
        links: `pages` is its address.
    """

    def __init__(self, links: NodeLinks) -> None:
        self._socket = bind_answers(links.pages, links.prepare_bind, MAX_QUESTION_BYTES)

    def receive(self, timeout_s: float | None = None) -> tuple[bytes, Question] | None:
        """Return the next question, and the address of its sender; None after the time.

        Malformed questions are dropped. timeout_s: None: wait without end.
        """
        while self._socket.poll(None if timeout_s is None else int(1000 * timeout_s)):
            sender, *frames = self._socket.recv_multipart()
            try:
                (frame,) = frames
                return sender, _decode_question(frame)
            except (ValueError, msgspec.MsgspecError) as error:
                logging.warning("a malformed question for KV pages is dropped: %s", error)
        return None

    def send(self, receiver: bytes, answer: Answer, page: Any = None) -> None:
        """Send an answer; never block. It is dropped where its receiver has gone.

        Args:
            receiver: address of the sender of the question.
            answer: the message.
            page: of a PageSent: its bytes, which the caller must not change afterwards.
        """
        self._socket.send_multipart([receiver, encode(answer)], zmq.NOBLOCK | (
            0 if page is None else zmq.SNDMORE
        ))  # fmt: skip
        if page is not None:
            self._socket.send(page, zmq.NOBLOCK, copy=False)

    def close(self) -> None:
        """Close the socket; what is unsent is discarded."""
        self._socket.close(linger=0)


class AskingLink:
    """The end of the link at a replica that needs pages. Used by one thread.

    Args:
        links: `pages` is the address of the other end.
        max_page_bytes: longest answer.
    """

    def __init__(self, links: NodeLinks, max_page_bytes: int) -> None:
        self._socket = connect_questions(links.pages, links.prepare_connect, max_page_bytes)
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._monitor = self._socket.get_monitor_socket(events)

    @property
    def sockets(self) -> Sequence[LinkSocket]:
        """What is readable when there is something to receive."""
        return self._socket, self._monitor

    def take_changes(self) -> Sequence[bool]:
        """Return what has become of the connection since the last call.

        Returns:
            For each change: True where it was made, False where it was lost.
        """
        changes = []
        while is_readable(self._monitor):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            changes.append(event == zmq.EVENT_HANDSHAKE_SUCCEEDED)
        return changes

    def receive(self) -> tuple[Answer, memoryview] | None:
        """Return an answer that has arrived, and the page that belongs to it; None: there is none.

        Raises:
            ValueError: it is malformed.
        """
        if not is_readable(self._socket):
            return None
        frame, *more = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        answer = _decode_answer(frame.buffer)
        return answer, more[0].buffer if more else memoryview(b"")

    def send(self, question: Question) -> bool:
        """Send a question; never block. Return False where there is no connection."""
        try:
            self._socket.send(encode(question), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Close the socket; what is unsent is discarded."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)


def wait_for_answers(links: Sequence[AskingLink], timeout_s: float) -> bool:
    """Wait until one of the links has something to receive; return False after the time."""
    poller = zmq.Poller()
    for link in links:
        for socket in link.sockets:
            poller.register(socket, zmq.POLLIN)
    return bool(poller.poll(max(0, int(1000 * timeout_s))))
