"""The frontend in the test's process, without sockets and other processes."""

import asyncio
import threading
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import msgspec
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from quadriga.errors import InvalidRequest
from quadriga.sampling.params import Grammar
from quadriga.server.config.engine_args import IN_TURN
from quadriga.server.config.frontend_args import FrontendArgs
from quadriga.server.models.resolve import ModelFiles
from quadriga.wire.async_sockets import Unreachable
from quadriga.wire.client import Chunks, Generate, Refused, ServerMessage
from quadriga.wire.packing import pack_ids
from quadriga.wire.sockets import Outbox, encode
from quadriga.wire.to_detok import (
    Delivered,
    KnownRequest,
    KnownRequests,
    ReplicaNews,
    StepNews,
)
from quadriga.wire.to_scheduler import FrontendRestarted, Submit
from quadriga.wire.trace import RequestTrace
from tokenizer_proc.deliver.traces import RingTraces
from tokenizer_proc.frontend import Frontend
from tokenizer_proc.intake.grammar_validator import GrammarValidator
from tokenizer_proc.intake.intake import RequestPreparation
from tokenizer_proc.intake.overload import OverloadGuard
from tokenizer_proc.intake.tenants import RequestOwners
from tokenizer_proc.preparation.chat import ChatTemplate
from tokenizer_proc.preparation.encode import Encoder
from tokenizer_proc.preparation.prepare import MAX_INLINE_BYTES, Preparer
from tokenizer_proc.replicas.placed import RouterKey
from tokenizer_proc.replicas.replicas import Replicas
from tokenizer_proc.replicas.router import Router

VOCAB = 100
SENDER = 1000  # number of the frontend


def model(context: int = 16) -> ModelFiles:
    config = {"vocab_size": VOCAB, "max_position_embeddings": context, "eos_token_id": [7, 9]}
    return ModelFiles("m", "m", config, {}, Path(), None)


class Recorder:
    """A scheduler, socket or connection that keeps what is sent to it."""

    is_open = True

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, *message: Any) -> bool:
        self.sent.append(message[-1])
        return True

    def renew(self) -> None:
        self.sent.clear()

    def check(self) -> None:
        pass

    async def open(self, timeout: float) -> None:
        pass


class Port(Recorder):
    """Takes the frontend's answers. `missing` holds clients that cannot be reached."""

    def __init__(self) -> None:
        super().__init__()
        self.missing: set[bytes] = set()

    def send(self, *message: Any) -> bool:
        if message[0] in self.missing:
            raise Unreachable
        return super().send(*message)

    def last(self) -> ServerMessage:
        message: ServerMessage = msgspec.msgpack.decode(self.sent[-1], type=ServerMessage)
        return message


class LatePool:
    """Prepares long messages when the test says so. The jobs of lost clients go on."""

    def __init__(self, preparer: Preparer) -> None:
        self._preparer = preparer
        self.begun: list[tuple[bytes, asyncio.Future[bytes]]] = []

    def submit(self, client: bytes, frame: bytes) -> "asyncio.Future[bytes]":
        outcome: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.begun.append((frame, outcome))
        return outcome

    def drop(self, client: bytes) -> None:
        pass

    async def finish(self) -> None:
        """Finish the oldest message, and let the frontend go on with it."""
        frame, outcome = self.begun.pop(0)
        if not outcome.done():
            outcome.set_result(self._preparer.prepare_frame(frame))
        for _ in range(3):
            await asyncio.sleep(0)


class SlowGrammars(GrammarValidator):
    """Finishes its checks when `go` is set; a grammar "wrong" is refused."""

    def __init__(self) -> None:
        super().__init__(model())
        self.go = threading.Event()

    def _check_in_thread(self, grammar: Grammar) -> str:
        assert self.go.wait(10)
        if grammar.text == "wrong":
            raise InvalidRequest("regex is wrong", "regex")
        return "form"


class OneTokenEncoder:
    """Encodes every text as one token."""

    def render(self, prompt: object, chat: object) -> str:
        return str(prompt)

    def encode(self, text: str, is_chat: bool) -> "array[int]":
        return array("i", [1])


class FrontendWorld:
    """A frontend of one replica, without sockets.

    Args:
        limit: holds for the open requests of one client.
    """

    def __init__(
        self,
        max_queued: int = 4,
        limit: int | None = None,
        replaces: bool = False,
        owners: RequestOwners | None = None,
        traces: RingTraces | None = None,
        args: FrontendArgs | None = None,
    ) -> None:
        self.scheduler, self.port = Recorder(), Port()
        preparer = Preparer(args or FrontendArgs(), model(), OneTokenEncoder())  # type: ignore[arg-type]
        self.pool = LatePool(preparer)
        guard = OverloadGuard(max_queued, limit)
        router = Router[RouterKey](IN_TURN, 1, 0, 16, max_queued)
        self.replicas = Replicas(1, router, 0, lambda _: None, SENDER, lists_replicas=False)
        self.replicas.join(0, cast("Outbox", self.scheduler))
        self.grammars = SlowGrammars()
        preparation = RequestPreparation(preparer, self.pool, self.grammars)  # type: ignore[arg-type]
        self.frontend = Frontend(
            preparation, guard, self.replicas, {}, replaces, owners=owners, traces=traces
        )
        self.frontend.clients.open(self.port)  # type: ignore[arg-type]
        self.replicas.listener = self.frontend
        if replaces:
            self.replicas.send(FrontendRestarted())
        else:
            self.restate()
        self.scheduler.sent.clear()

    def restate(self, names: Iterable[tuple[bytes, str]] = ()) -> None:
        """Report what the scheduler knows: no request that is open, and the names of others."""
        known = KnownRequests([KnownRequest(*name) for name in names])
        self.receive(b"", encode(known), b"")
        step = StepNews(ReplicaNews(restates=True, frontend=SENDER), [], [], b"")
        self.receive(b"", b"", encode(step))

    def receive(self, *frames: bytes) -> None:
        """Let the detokenizer send something."""
        self.replicas.on_delivery(0, list(frames))

    def restart_scheduler(self) -> None:
        """Let a new scheduler take the place of one that died, with all that it was sent."""
        self.replicas.on_died(0, "scheduler_proc")
        self.replicas.on_restarted(0, "scheduler_proc")

    def ask(self, name: str, client: bytes = b"c", late: bool = False, **fields: Any) -> None:
        """Send a request; a late one has a text that is too long to be encoded at once."""
        ids = None if late else pack_ids([1])
        text = "text " * MAX_INLINE_BYTES if late else ""
        message = Generate(1, name, text, prompt_token_ids=ids, **fields)
        self.frontend.on_public([client, encode(message)])

    def refusal(self) -> tuple[str, str]:
        """Return the request id and the error's code of the last answer."""
        refused = self.port.last()
        assert isinstance(refused, Refused)
        return refused.request_id, refused.error.code

    def lose(self, client: bytes = b"c") -> None:
        """Lose the connection of a client, which may come back."""
        self.port.missing.add(client)
        self.deliver(client)
        self.port.missing.clear()

    def deliver(
        self,
        client: bytes = b"c",
        ended: tuple[str, ...] = (),
        waiting: int = 0,
        settled: tuple[int, ...] = (),
        lost: bool = False,
        generated: tuple[int, ...] = (),
        traces: tuple[RequestTrace, ...] = (),
    ) -> None:
        """Deliver a message, with the ends of the next choices of some requests.

        Those of a lost client are of the requests as it had sent them first.
        """
        ends: list[tuple[int, int]] = []
        for number, name in enumerate(ended):
            request = self.replicas.requests.find(client, name)
            choices = request.choices.items() if request is not None else ()
            left = [
                (i, choice.since if lost else choice.placement)
                for i, choice in choices
                if not choice.has_ended
            ]
            num_before = ended[:number].count(name)
            ends.append(left[num_before] if num_before < len(left) else (0, 0))
        delivered = Delivered(
            list(ended),
            waiting,
            dict.fromkeys(settled, 0),
            generated=list(generated or [0] * len(ended)),
            traces=list(traces),
            lost=lost,
            indexes=[index for index, _ in ends],
            placements=[placement for _, placement in ends],
        )
        self.receive(client, encode(Chunks([])), encode(delivered))

    @property
    def submitted(self) -> list[str]:
        return [m.request_id for m in self.scheduler.sent if isinstance(m, Submit)]


BOS, EOS, A, B = range(4)


def encoder(directory: Path, template: str | None) -> Encoder:
    """Return an encoder of the words a and b, with a post-processor's template."""
    vocabulary = {"<bos>": BOS, "<eos>": EOS, "a": A, "b": B}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="b"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("<bos>"), AddedToken("<eos>")])
    if template:
        tokenizer.post_processor = TemplateProcessing(
            single=template, special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
        )
    jinja = directory / "chat.jinja"
    jinja.write_text("<bos>{{ messages[0]['content'] }}")
    (directory / "tokenizer_config.json").write_text("{}")
    return Encoder(tokenizer, ChatTemplate(directory, jinja))
