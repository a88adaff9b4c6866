"""The JSON of --kv-events-config, with the fields and defaults of vLLM's KVEventsConfig."""

from typing import Annotated, Literal

import msgspec

from quadriga.errors import ConfigError
from quadriga.wire.sockets import IPC

MAX_PORT = 65535
_TCP = "tcp://"
Positive = Annotated[int, msgspec.Meta(gt=0)]


class KVEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the events of the prefix cache are published.

    Attributes:
        enable_kv_cache_events: whether there are any.
        publisher: "zmq", or "null" for none; "": "zmq".
        endpoint: of the PUB socket, which is bound where the address has a `*` or is a path, and
            connected otherwise.
        replay_endpoint: of the ROUTER socket that sends events again, which is bound; None: none.
        buffer_steps: number of batches that it has.
        hwm: number of batches for a slow subscriber, beyond which it loses some.
        max_queue_size: number of batches that wait for the thread that publishes them.
        topic: first frame of every message.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null", ""] | None = ""
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: Positive = 10_000
    hwm: Positive = 100_000
    max_queue_size: Positive = 100_000
    topic: str = ""

    @property
    def is_on(self) -> bool:
        """Whether events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"

    def of_replica(self, number: int) -> "KVEventsConfig":
        """Return the config of a replica: each has the next port, or a path of its own."""
        replay = self.replay_endpoint
        return msgspec.structs.replace(
            self,
            endpoint=_endpoint_of(self.endpoint, number),
            replay_endpoint=replay and _endpoint_of(replay, number),
        )


def _endpoint_of(endpoint: str, number: int) -> str:
    if endpoint.startswith(_TCP):
        host, _, port = endpoint.rpartition(":")
        return f"{host}:{int(port) + number}"
    return f"{endpoint}_dp{number}" if number else endpoint


def parse_kv_events(text: str) -> KVEventsConfig:
    """Return the config of a flag. "" is one without events.

    Raises:
        ConfigError: the text is no such JSON, or has an endpoint that no socket can have.
    """
    if not text:
        return KVEventsConfig()
    try:
        config = msgspec.json.decode(text, type=KVEventsConfig)
    except msgspec.DecodeError as error:
        example = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'
        raise ConfigError(
            f"kv_events_config is {text!r}: {error}; it must be JSON such as {example}"
        ) from None
    for name in ("endpoint", "replay_endpoint"):
        value = getattr(config, name)
        if value is not None and not _is_endpoint(value):
            raise ConfigError(
                f"kv_events_config has {name} {value!r}: it must be tcp://HOST:PORT, such as"
                " tcp://*:5557, or ipc://PATH"
            )
    if config.endpoint == config.replay_endpoint:
        raise ConfigError(
            f"kv_events_config has {config.endpoint!r} as endpoint and as replay_endpoint: give"
            " each its own"
        )
    return config


def _is_endpoint(text: str) -> bool:
    if text.startswith(IPC):
        return len(text) > len(IPC)
    host, _, port = text.removeprefix(_TCP).rpartition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port) <= MAX_PORT
    return text.startswith(_TCP) and bool(host) and is_port
