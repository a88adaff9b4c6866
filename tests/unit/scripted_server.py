"""A server that starts, stops, freezes, refuses and forgets at times that a seed chooses."""

import asyncio
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from quadriga.wire.client import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    Chunk,
    Chunks,
    ClientMessage,
    End,
    ErrorInfo,
    Generate,
    GetInfo,
    Info,
    Ping,
    Pong,
    Probe,
    RefusalInfo,
    Refused,
    Replay,
    ServerGone,
    Tokenize,
    Tokens,
)
from quadriga.wire.packing import pack_ids
from quadriga.wire.sockets import encode
from tests.unit.public_messages import make_chunk, make_end
from tests.unit.scripted_network import Network

# A request with this word in its prompt is accepted and never answered.
SILENT = "silent"

_decode = msgspec.msgpack.Decoder(ClientMessage).decode


def letter(prompt: str, index: int) -> int:
    """Return the token that a choice of this prompt repeats: the code of a letter."""
    return 97 + (sum(map(ord, prompt)) + index) % 26


@dataclass
class Request:
    """An open request, with the tokens of each choice and the choices that have ended."""

    client: bytes
    message: Generate
    made: list[int]
    ends: dict[int, str] = field(default_factory=dict)

    def piece(self, index: int, first: int) -> Chunk:
        """Return the tokens of a choice from `first` on, with its end if it has ended."""
        made, code = self.made[index], letter(str(self.message.prompt), index)
        end = None
        if index in self.ends:
            end = make_end(made, self.ends[index])
        elif not self.message.stream:
            made = first
        ids = [code] * (made - first)
        return make_chunk(self.message.request_id, first, chr(code) * len(ids), ids, end, index)


class Server:
    """The state that outlives a frontend: requests, and the way in which messages are answered.

    Attributes:
        ping_loss: Probability that a ping is dropped.
        refusal: Probability that a request is refused.
        gap: Probability that a chunk is lost, unless it is the last.
        retry_after: Hint of refusals.
        refused: Requests that were refused.
        refuses_in_the_ring: The scheduler refuses requests that are sent again, as their end.
        loses_acknowledgement: The next Accepted is lost.
        slowness: Longest delay of an answer in seconds.
    """

    def __init__(self, network: Network, chosen: random.Random) -> None:
        self.network = network
        self.chosen = chosen
        self.requests: dict[str, Request] = {}
        self.refused: list[Generate] = []
        self.retry_after: float | None = None
        self.max_frame_bytes = MAX_FRAME_BYTES
        self.calm_down()

    def calm_down(self) -> None:
        self.ping_loss = self.refusal = self.gap = 0.0
        self.refuses_in_the_ring = self.loses_acknowledgement = False
        self.slowness = 0.01

    @property
    def door(self) -> "Door | None":
        door = self.network.door
        assert door is None or isinstance(door, Door)
        return door

    def start(self) -> None:
        if self.door is None:
            self.network.listen(Door(self))

    def later(self, longest: float, call: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(self.chosen.uniform(0, longest), call)

    def say(self, client: bytes, message: msgspec.Struct) -> None:
        if self.door is not None:
            self.network.send(client, encode(message))

    def accept(self, client: bytes, message: Generate) -> None:
        request = Request(client, message, [0] * message.params.n)
        self.requests[message.request_id] = request
        if SILENT not in str(message.prompt):
            self.later(self.slowness, lambda: self.step(request))

    def acknowledge(self, client: bytes, message: Generate) -> None:
        is_lost, self.loses_acknowledgement = self.loses_acknowledgement, False
        if message.acknowledge and not is_lost:
            self.say(client, Accepted(message.request_id, len(message.prompt)))

    def step(self, request: Request) -> None:
        """Generate some tokens for each choice of a request that is still known."""
        name, max_tokens = request.message.request_id, request.message.params.max_new_tokens or 1
        if self.requests.get(name) is not request:
            return
        before = list(request.made)
        for index in set(range(len(before))) - set(request.ends):
            request.made[index] = min(max_tokens, before[index] + self.chosen.randint(0, 3))
            if request.made[index] == max_tokens:
                request.ends[index] = "length"
            first = before[index] if request.message.stream else 0
            is_lost = index not in request.ends and self.chosen.random() < self.gap
            if request.made[index] > before[index] and not is_lost:
                self.say(request.client, Chunks([request.piece(index, first)]))
        if len(request.ends) < len(before):
            self.later(self.slowness, lambda: self.step(request))

    def replay(self, request: Request) -> None:
        pieces = [request.piece(index, 0) for index in range(len(request.made))]
        self.say(request.client, Replay(pieces))

    def abort(self, client: bytes, name: str) -> None:
        for request in self.requests.values():
            if request.client == client and name in ("", request.message.request_id):
                for index in set(range(len(request.made))) - set(request.ends):
                    first = request.made[index] if request.message.stream else 0
                    request.ends[index] = "abort"
                    self.say(client, Chunks([request.piece(index, first)]))

    def farewell(self, code: str) -> None:
        """Send ServerGone to all clients, which ends their requests."""
        clients = {request.client for request in self.requests.values()}
        for client in clients:
            self.say(client, ServerGone(ErrorInfo(code, "good bye")))
        self.requests.clear()


class Door:
    """A frontend, which may be frozen, and does not know the messages of its predecessor."""

    def __init__(self, server: Server) -> None:
        self.is_frozen = False
        self._server = server
        self._instance = uuid.uuid4().hex

    def lost(self, client: bytes) -> None:
        """Handle the end of a connection: drop the requests of a client that is not back."""
        server = self._server
        if server.door is self and server.network.cable_of(client) is None:
            for name, request in list(server.requests.items()):
                if request.client == client:
                    del server.requests[name]

    def take(self, client: bytes, frame: bytes) -> None:
        message, server = _decode(frame), self._server
        if server.door is not self:
            return
        answer: msgspec.Struct | None = None
        match message:
            case Ping():
                if server.chosen.random() >= server.ping_loss:
                    answer = Pong(PROTOCOL_VERSION, self._instance, server.max_frame_bytes)
            case GetInfo():
                answer = Info(message.request_id, {"running": len(server.requests)})
            case Tokenize():
                answer = Tokens(message.request_id, pack_ids([1, 2, 3]))
            case Abort():
                server.abort(client, message.request_id)
            case Generate():
                self._generate(client, message)
        if server.chosen.random() < 0.1:
            server.say(client, Probe())
        if answer is not None:
            reply = answer
            server.later(server.slowness, lambda: self._say(client, reply))

    def _say(self, client: bytes, message: msgspec.Struct) -> None:
        if self._server.door is self:
            self._server.say(client, message)

    def _generate(self, client: bytes, message: Generate) -> None:
        server = self._server
        request = server.requests.get(message.request_id)
        if request is not None:
            if message.resent:
                server.acknowledge(client, message)
                server.replay(request)
        elif server.chosen.random() < server.refusal:
            server.refused.append(message)
            error = RefusalInfo("queue_full", "no room", "", server.retry_after)
            if not (message.resent and server.refuses_in_the_ring):
                server.say(client, Refused(message.request_id, error))
                return
            server.acknowledge(client, message)
            server.say(client, Replay(_empty(message, None)))
            end = make_end(0, error=ErrorInfo(error.code, error.message, "", error.retry_after))
            server.say(client, Chunks(_empty(message, end)))
        else:
            server.acknowledge(client, message)
            if message.resent:
                server.say(client, Replay(_empty(message, None)))
            server.accept(client, message)


def _empty(message: Generate, end: End | None) -> list[Chunk]:
    """Return a chunk without tokens for each choice."""
    return [
        make_chunk(message.request_id, 0, "", [], end, index) for index in range(message.params.n)
    ]
