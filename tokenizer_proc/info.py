"""The frontend's part of Info, and a bound on the questions that travel round the ring."""

import time
from collections import deque
from collections.abc import Callable

from quadriga.answer_format import AnswerFormat, to_info
from quadriga.config.server_config import ServerConfig
from quadriga.fill_format import FillFormat, fill_format_to_info
from quadriga.model_details import details_to_info
from quadriga.model_files.resolve import ModelFiles
from quadriga.wire.messages.from_client import MAX_FRAME_BYTES, PROTOCOL_VERSION
from quadriga.wire.messages.to_client import InfoValues
from tokenizer_proc.model_details import model_details
from tokenizer_proc.overload import check_room

MAX_PENDING_OF_CLIENT = 32
MAX_PENDING = 256
# A question that is older was lost with a process that died.
EXPIRY_S = 10.0


def static_server_info(
    config: ServerConfig,
    model: ModelFiles,
    has_chat: bool,
    answer_format: AnswerFormat,
    fill_format: FillFormat | None,
    pids: dict[str, int],
) -> InfoValues:
    """Return the values that do not change while the server runs; docs/protocol.md lists them."""
    return {
        "protocol": PROTOCOL_VERSION,
        "model": config.model.shown_name,
        "model_details": details_to_info(model_details(model)),
        "endpoint": config.frontend.endpoint,
        "context_length": model.context_length,
        "vocab_size": model.vocab_size,
        "max_frame_bytes": MAX_FRAME_BYTES,
        "max_batch_size": config.scheduler.max_batch_size,
        "prefill_max_batch_size": config.scheduler.prefill_width,
        "max_running_requests": config.scheduler.max_running_requests,
        "max_queued_requests": config.scheduler.max_queued_requests,
        "default_max_tokens": config.frontend.default_max_tokens,
        "chat": has_chat,
        "answer_format": to_info(answer_format),
        "fill_format": fill_format_to_info(fill_format),
        "tokenize_workers": config.frontend.tokenize_workers,
        "stream_interval": config.detok.stream_interval,
        "pids": dict(pids),
    }


class InfoRequests:
    """Count the unanswered GetInfo, FlushCache and GetProgress messages: each costs some work."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sent_at: dict[bytes, deque[float]] = {}

    def begin(self, client: bytes) -> None:
        """Count a question. Raise QueueFull where the client, or all together, have too many."""
        self._expire(client)
        num_of_client = len(self._sent_at.get(client, ()))
        num_of_all = sum(map(len, self._sent_at.values()))
        for count, limit, whose in (
            (num_of_client, MAX_PENDING_OF_CLIENT, " of this client"),
            (num_of_all, MAX_PENDING, ""),
        ):
            check_room(count, limit, f"questions{whose} are not answered yet")
        self._sent_at.setdefault(client, deque()).append(self._clock())

    def end(self, client: bytes) -> None:
        """Take back the oldest question of a client, which is answered."""
        sent_at = self._sent_at.get(client)
        if sent_at:
            sent_at.popleft()
            if not sent_at:
                del self._sent_at[client]

    def forget(self, client: bytes) -> None:
        """Take back all questions of a client that is gone."""
        self._sent_at.pop(client, None)

    def _expire(self, client: bytes) -> None:
        expired_at = self._clock() - EXPIRY_S
        while (sent_at := self._sent_at.get(client)) and sent_at[0] <= expired_at:
            self.end(client)
