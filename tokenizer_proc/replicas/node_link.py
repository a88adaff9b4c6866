"""The frontend's links with a replica on another machine, whose loss is noticed."""

import logging
from collections.abc import Callable

from quadriga.wire.async_port import AsyncPort
from quadriga.wire.connection_watch import ConnectionWatch
from quadriga.wire.node_links import NodeLinks
from quadriga.wire.sockets import LinkSocket, Outbox, bind_frames


class RefusalLog:
    """Logs that a machine refuses a link, or is refused: once, as it goes on trying."""

    def __init__(self, links: NodeLinks) -> None:
        self._links = links
        self._is_logged = False

    def note(self, reason: str) -> None:
        """Log a refusal, if it is the first one."""
        severity = logging.DEBUG if self._is_logged else logging.ERROR
        self._is_logged = True
        logging.log(
            severity,
            "a link to the replica at %s is refused (%s): copy this server's --curve-dir, with its"
            " inner key, to that machine",
            self._links.scheduler, reason,
        )  # fmt: skip


class WatchedOutbox(Outbox):
    """An outbox that calls back when its connection is lost. Needs a running event loop.

    What is sent to a peer that refuses the connection is lost, like all that was on a lost one.
    """

    def __init__(self, links: NodeLinks, on_loss: Callable[[], None], refusals: RefusalLog) -> None:
        self._links = links
        self._on_loss = on_loss
        self._refusals = refusals
        super().__init__(links.scheduler, self._prepare_watched)

    def _prepare_watched(self, link: LinkSocket) -> None:
        """Prepare a socket, and watch it before its first connection, which may be refused."""
        self._links.prepare_connect(link)
        self._watch = ConnectionWatch(link, self._on_loss, on_refusal=self._refusals.note)

    def _refuse(self) -> None:
        self._refusals.note("its connection has ended")

    def renew(self) -> None:
        """Reconnect; unsent messages are discarded."""
        self._watch.close()
        super().renew()

    def close(self) -> None:
        """Close the socket; what is unsent is discarded."""
        self._watch.close()
        super().close()


class NodeLink:
    """Both directions of the link with one run of a replica.

    A loss is noticed before anything is received that a later connection has brought, because each
    message looks for it first.

    Args:
        links: the addresses.
        on_frames: called with the frames of each message of its detokenizer.
        on_loss: called when a connection is lost.
    """

    def __init__(
        self,
        links: NodeLinks,
        on_frames: Callable[[list[bytes]], None],
        on_loss: Callable[[], None],
    ) -> None:
        self.links = links
        refusals = RefusalLog(links)
        self.outbox = WatchedOutbox(links, on_loss, refusals)
        results = bind_frames(links.delivery, links.prepare_bind)
        self._watch = ConnectionWatch(results, on_loss, on_refusal=refusals.note)

        def receive(frames: list[bytes]) -> None:
            self._watch.process()
            on_frames(frames)

        self._port = AsyncPort(results, receive)

    def close(self) -> None:
        """Stop receiving. A replica that was only cut off reaches nothing any more."""
        self._watch.close()
        self._port.close(linger_s=0)
