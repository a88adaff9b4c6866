"""The frontend's links with a replica on another machine, whose loss is noticed."""

import logging
from collections.abc import Callable

from quadriga.wire.connection_watch import ConnectionWatch
from quadriga.wire.node_links import NodeLinks
from quadriga.wire.sockets import AsyncPort, Outbox, bind_frames


class WatchedOutbox(Outbox):
    """An outbox that calls back when its connection is lost. Needs a running event loop."""

    def __init__(self, links: NodeLinks, on_loss: Callable[[], None]) -> None:
        self._on_loss = on_loss
        super().__init__(links.scheduler, links.prepare_connect)
        self._watch = ConnectionWatch(self.socket, on_loss, on_refusal=_log_refusal)

    def renew(self) -> None:
        """Reconnect; unsent messages are discarded."""
        self._watch.close()
        super().renew()
        self._watch = ConnectionWatch(self.socket, self._on_loss, on_refusal=_log_refusal)

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
        self.outbox = WatchedOutbox(links, on_loss)
        results = bind_frames(links.delivery, links.prepare_bind)
        self._watch = ConnectionWatch(results, on_loss, on_refusal=_log_refusal)

        def receive(frames: list[bytes]) -> None:
            self._watch.process()
            on_frames(frames)

        self._port = AsyncPort(results, receive)

    def close(self) -> None:
        """Stop receiving. A replica that was only cut off reaches nothing any more."""
        self._watch.close()
        self._port.close(linger_s=0)


def _log_refusal(reason: str) -> None:
    logging.error(
        "a link to a replica on another machine is refused (%s): copy the same --curve-dir, with"
        " its inner key, to every machine",
        reason,
    )
