"""Each choice has one owner, whatever dies or is recalled while clients send requests again.

Real frontend, schedulers with journals, and detokenizers, with queues in place of sockets. What is
delivered when, and what dies, is drawn. A worker's tokens depend on those before them only.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from detok_proc.detokenizer import Detokenizer
from detok_proc.main import DetokenizerLoop
from quadriga.sampling.params import SamplingParams
from quadriga.server.config.engine_args import IN_TURN, SchedulerArgs
from quadriga.wire.client import Chunk, Chunks, Replay
from quadriga.wire.packing import pack_ids, unpack_ids
from quadriga.wire.sockets import Outbox, encode
from quadriga.wire.to_detok import DetokMessage
from quadriga.wire.to_scheduler import (
    CLIENT,
    FrontendRestarted,
    LoadAhead,
    SchedulerMessage,
    Submit,
)
from quadriga.wire.worker import PagesLoaded, StoredPages, WorkerReady
from scheduler_proc.journal.file import JournalRecord
from scheduler_proc.journal.recovery import JournalState
from scheduler_proc.journal.writer import FileJournal
from scheduler_proc.observe import replica_report
from scheduler_proc.observe.replica_report import ReplicaReport
from scheduler_proc.scheduler import Scheduler
from tests.unit.simulated_tiers import TieredWorker
from tests.unit.simulation import EOS, SimulatedWorker, reference
from tests.unit.tiny_vocabulary import TOKENIZER
from tokenizer_proc.replicas.placed import Name, RouterKey
from tokenizer_proc.replicas.replicas import ClientResult, Replicas
from tokenizer_proc.replicas.roles import RoleRouter, Roles
from tokenizer_proc.replicas.router import Prompt, Routed, Router

BLOCK, PAGE = 64, 4
VOCABULARY = 257
MAX_ROUNDS = 2000

decode_to_scheduler = msgspec.msgpack.Decoder(SchedulerMessage).decode
decode_to_detok = msgspec.msgpack.Decoder(DetokMessage).decode
decode_chunks = msgspec.msgpack.Decoder(Chunks | Replay).decode
decode_record = msgspec.msgpack.Decoder(JournalRecord).decode


class Pipe:
    """One direction of a connection: encoded messages, in order."""

    def __init__(self) -> None:
        self.messages: deque[Any] = deque()
        self.num_sent = 0
        self.is_open = True

    def send(self, message: msgspec.Struct) -> None:
        self.num_sent += 1
        self.messages.append(encode(message))

    def send_frames(self, *frames: bytes) -> None:
        self.num_sent += 1
        self.messages.append(list(frames))

    def renew(self) -> None:
        self.messages.clear()

    def close(self) -> None:
        self.messages.clear()


class MemoryFile:
    """A journal's file in memory. A step's messages may have gone out, and its frame be lost."""

    path = "memory"
    size = 0

    def __init__(self, messages: Pipe) -> None:
        self.frames: list[bytes] = []
        self._messages = messages
        self._num_sent_before = -1

    def append(self, payload: bytes) -> None:
        self.frames.append(payload)
        self._num_sent_before = self._messages.num_sent

    def lose_last_frame(self) -> None:
        """Lose the last frame, unless a message was sent after it was written."""
        if len(self.frames) > 1 and self._num_sent_before == self._messages.num_sent:
            self.frames.pop()

    def rewrite(self, payloads: Iterator[bytes]) -> None:
        self.frames = list(payloads)
        self._num_sent_before = -1  # nothing of it is lost

    def recovered(self) -> list[Any]:
        state = JournalState(VOCABULARY)
        for frame in self.frames:
            state.apply(decode_record(frame))
        return [state.requests[seq] for seq in sorted(state.requests)]


class RoleWorker(TieredWorker):
    """A worker whose tier is that of all replicas, which is found changed now and then.

    Args:
        tier: what each page holds, by its name.
    """

    def __init__(self, tier: dict[bytes, list[int]]) -> None:
        super().__init__(PAGE)
        self._shared = self.tier = tier

    def restart(self) -> None:
        super().restart()
        self.tier = self._shared

    def transfer(self) -> PagesLoaded | StoredPages | None:
        message = super().transfer()
        if isinstance(message, PagesLoaded):
            return msgspec.structs.replace(message, num_fetched=message.num_loaded)
        return message


class ApartRouter(RoleRouter[RouterKey]):
    """Computes every prompt that may change its replica at one of the first role."""

    def stays_here(self, prompt: Prompt, here: Routed, there: Routed) -> bool:
        return False

    def choose_ahead(self, prompt: Prompt, replica: int, before: int | None) -> int | None:
        """Choose another one each time: a request may go on elsewhere."""
        ready = self._with_room(prompt.num_tokens)
        return min(ready, key=lambda number: number == before) if ready else None


class Ring:
    """A replica's scheduler, worker and detokenizer."""

    def __init__(self, number: int, world: "World") -> None:
        self.number, self.world = number, world
        self.to_scheduler: list[Pipe] = []  # one of each frontend, and of the detokenizer
        self.from_detok = Pipe()
        self.to_detok = Pipe()
        self.file = MemoryFile(self.to_detok)
        self.delivery = Pipe()
        self.dead: set[str] = set()
        self.num_schedulers = 0
        self.worker = RoleWorker(world.tier) if world.num_prefill else SimulatedWorker(PAGE)
        self.start_scheduler()
        self.start_detok()

    def start_scheduler(self) -> None:
        self.num_schedulers += 1
        self.to_scheduler = [pipe for pipe in self.to_scheduler if pipe.is_open]
        journal = FileJournal(cast("Any", self.file))
        self.scheduler = Scheduler(
            self.world.args, frozenset({EOS}), self.worker, self.to_detok,
            lambda: self.worker.now, journal,
        )  # fmt: skip
        self.scheduler.lifecycle.report = ReplicaReport(self.world.notes_steps, self.is_prefill)
        is_restart = self.num_schedulers > 1
        first = self.num_schedulers * 1_000_000 if is_restart else 0
        self.scheduler.lifecycle.restore(self.file.recovered(), first)
        if is_restart:
            self.to_detok.send_frames(b"restart")
        self.worker.restart()
        self.dead.discard("scheduler_proc")
        self.ready_worker()

    def ready_worker(self) -> None:
        ready = WorkerReady(
            256, PAGE, 4, "float32", "cpu", prefill_tokens=64, session=self.worker.session
        )
        if isinstance(self.worker, RoleWorker):
            stored = self.worker.stored_names() if self.is_prefill else None
            ready = msgspec.structs.replace(ready, stored=stored, fetches=True)
        self.scheduler.step([], [ready])

    @property
    def is_prefill(self) -> bool:
        """Whether it computes prompts for others."""
        return self.number < self.world.num_prefill

    def start_detok(self) -> None:
        self.from_detok = Pipe()
        self.detok = DetokenizerLoop(
            Detokenizer(TOKENIZER, 1, lambda: 0.0, slice_s=self.world.slice_s),
            cast("Outbox", self.delivery),
            cast("Outbox", self.from_detok),
        )
        self.dead.discard("detok_proc")

    # --- what happens -----------------------------------------------------------------------------

    def read_scheduler(self, turn: int) -> bool:
        """Let the scheduler read a message of one of its connections."""
        pipes = [p for p in (*self.to_scheduler, self.from_detok) if p.messages]
        if not pipes or "scheduler_proc" in self.dead:
            return False
        message = decode_to_scheduler(pipes[turn % len(pipes)].messages.popleft())
        self.world.num_loaded_ahead += isinstance(message, LoadAhead)
        self.scheduler.step([message], [])
        return True

    def run_worker(self) -> bool:
        if "scheduler_proc" in self.dead:
            return False
        if self.worker.done_at is None:
            self.worker.now += 1.0
            self.scheduler.step([], [])
        has_moved = self._move_pages()
        result = self.worker.run_one()
        if result is not None:
            self.scheduler.step([], [result])
            self.scheduler.check()
        return has_moved or result is not None

    def _move_pages(self) -> bool:
        message = self.worker.transfer() if isinstance(self.worker, RoleWorker) else None
        if message is not None:
            self.scheduler.step([], [message])
            self.scheduler.check()
        return message is not None

    def read_detok(self) -> bool:
        if "detok_proc" in self.dead:
            return False
        if not self.to_detok.messages:
            return self.detok.work()
        frame = self.to_detok.messages.popleft()
        if isinstance(frame, list):
            self.detok.begin_session()
        else:
            self.detok.handle(decode_to_detok(frame))
        return True

    def kill_scheduler(self, loses_frame: bool) -> None:
        if loses_frame:
            self.file.lose_last_frame()
        self.dead.add("scheduler_proc")
        self.worker.plans.clear()
        for pipe in self.to_scheduler:
            pipe.messages.clear()
        self.from_detok.messages.clear()

    def kill_detok(self) -> None:
        self.dead.add("detok_proc")
        self.from_detok.messages.clear()
        self.to_detok.messages.clear()


@dataclass
class Choice:
    text: str = ""
    ids: list[int] = field(default_factory=list)
    longest: list[int] = field(default_factory=list)
    awaits_replay: bool = False
    reason: str = ""


class ClientRequest:
    """A request as its client sees it, which checks each message as docs/protocol.md says."""

    def __init__(self, submit: Submit) -> None:
        self.submit = submit
        self.choices = [Choice() for _ in range(submit.params.n)]
        self.was_aborted = False

    @property
    def is_over(self) -> bool:
        return all(choice.reason for choice in self.choices)

    def take(self, chunk: Chunk, is_replay: bool) -> None:
        choice = self.choices[chunk.index]
        if choice.reason or (choice.awaits_replay and not is_replay):
            return
        if is_replay:
            choice.text, choice.ids, choice.awaits_replay = "", [], False
        assert chunk.text_offset == len(choice.text), "a chunk does not follow"
        choice.text += chunk.text
        choice.ids += unpack_ids(chunk.token_ids)
        known = min(len(choice.ids), len(choice.longest))
        assert choice.ids[:known] == choice.longest[:known], "it ran again with other tokens"
        choice.longest = max(choice.longest, choice.ids, key=len)
        if chunk.end is not None:
            assert chunk.end.error is None
            assert chunk.end.usage.completion_tokens == len(choice.ids)
            choice.reason = chunk.end.finish_reason

    def check(self) -> None:
        prompt = unpack_ids(self.submit.prompt_ids).tolist()
        params = self.submit.params
        first, num_all = params.first_token_ids, params.max_new_tokens or 0
        expected = first + reference(prompt + first, num_all - len(first), True)
        for choice in self.choices:
            assert choice.reason == "length" or self.was_aborted
            if choice.reason == "length":
                assert choice.ids == expected


class World:
    """A server of several replicas, its launcher, and a client."""

    def __init__(self, num_replicas: int, slice_s: float = 0.0, num_prefill: int = 0) -> None:
        """Initialize.

        Args:
            num_replicas: number of replicas.
            slice_s: of the detokenizers; 0: a delivery has one stream of a backlog.
            num_prefill: number of replicas that compute prompts for the others.
        """
        self.slice_s = slice_s
        self.num_prefill = num_prefill
        self.num_loaded_ahead = 0
        # Prompts are computed in parts where others can load these.
        chunk = PAGE if num_prefill else None
        self.args = SchedulerArgs(max_running_requests=4, chunked_prefill_size=chunk)
        self.tier: dict[bytes, list[int]] = {}
        self.num_frontends = 0
        self.time = 0.0
        self.requests: dict[str, ClientRequest] = {}
        self.to_client: deque[bytes] = deque()
        self.recalling: int | None = None
        self.lost: set[int] = set()
        self.notes_steps = num_replicas > 1
        self.rings = [Ring(number, self) for number in range(num_replicas)]
        self.start_frontend()

    # --- the frontend -----------------------------------------------------------------------------

    def start_frontend(self) -> None:
        self.num_frontends += 1
        count = len(self.rings)
        router = Router[RouterKey](IN_TURN, count, BLOCK, PAGE, 100)
        if self.num_prefill:
            router = ApartRouter(Roles(self.num_prefill, 4), IN_TURN, count, BLOCK, PAGE, 100)
        block_tokens = BLOCK if count > 1 else 0
        self.replicas = Replicas(
            count, router, block_tokens, self.on_recalled, sender=self.num_frontends * 1_000_000
        )
        self.replicas.listener = self
        for ring in self.rings:
            self.join(ring)
        if self.num_frontends > 1:
            self.replicas.send(FrontendRestarted())
        for ring in self.rings:
            if ring.number in self.lost:
                self.replicas.on_lost(ring.number)
            for process in ring.dead:
                self.replicas.on_died(ring.number, process)
        if self.recalling is not None:
            self.replicas.recall(self.recalling)

    def join(self, ring: Ring) -> None:
        pipe = Pipe()
        ring.to_scheduler.append(pipe)
        self.replicas.join(ring.number, cast("Outbox", pipe))

    def restart_frontend(self) -> None:
        """Kill the frontend and start another one, to which the client comes back."""
        for ring in self.rings:
            for pipe in ring.to_scheduler:
                pipe.is_open = False  # what it holds may still be read
        self.to_client.clear()
        self.start_frontend()
        self.resend_all()

    def deliver(self, result: ClientResult) -> None:
        if not result.is_lost:
            self.to_client.append(result.payload)

    def deliver_answer(self, client: bytes, payload: bytes) -> None:
        raise AssertionError("no question is asked")

    def on_drained(self) -> None:
        raise AssertionError("no server drains")

    def show(self, frame: bytes, replica: int) -> None:
        pass

    def on_known(self, known: dict[Name, Any]) -> None:
        pass

    def read_delivery(self, ring: Ring) -> bool:
        if not ring.delivery.messages:
            return False
        self.replicas.on_delivery(ring.number, ring.delivery.messages.popleft())
        return True

    # --- the launcher -----------------------------------------------------------------------------

    def recall(self, number: int) -> None:
        if self.recalling is None and number not in self.lost and not self.rings[number].dead:
            self.recalling = number
            self.replicas.recall(number)

    def on_recalled(self, number: int) -> None:
        """Restart the worker of a replica that has given its requests back."""
        if number != self.recalling:
            return
        self.recalling = None
        ring = self.rings[number]
        self.replicas.on_died(number, "worker_proc")
        if "scheduler_proc" not in ring.dead:
            while ring.run_worker():  # else requests that stay may seem to crash the worker
                pass
            ring.worker.restart()
            ring.ready_worker()
        self.replicas.on_restarted(number, "worker_proc")

    def kill(self, number: int, process: str, loses_frame: bool = False) -> None:
        ring = self.rings[number]
        if number in self.lost or process in ring.dead:
            return
        if process == "scheduler_proc":
            ring.kill_scheduler(loses_frame)
        else:
            ring.kill_detok()
        self.replicas.on_died(number, process)

    def restart(self, number: int) -> bool:
        """Restart what is dead of a replica."""
        ring = self.rings[number]
        dead = set() if number in self.lost else set(ring.dead)
        for process in sorted(dead):
            if process == "scheduler_proc":
                ring.start_scheduler()
            else:
                ring.start_detok()
            self.replicas.on_restarted(number, process)
        return bool(dead)

    def lose(self, number: int) -> None:
        """Lose a replica for good, unless it is the last one."""
        if number in self.lost or len(self.lost) == len(self.rings) - 1:
            return
        self.lost.add(number)
        if self.recalling == number:
            self.recalling = None
        ring = self.rings[number]
        ring.delivery.messages.clear()
        self.replicas.on_lost(number)

    def return_replica(self, number: int) -> None:
        """Start a lost replica again, which knows nothing."""
        if number in self.lost:
            self.lost.discard(number)
            self.rings[number] = ring = Ring(number, self)
            self.join(ring)

    # --- the client -------------------------------------------------------------------------------

    def submit(self, n: int, num_new_tokens: int, first_ids: list[int]) -> None:
        name = f"r{len(self.requests)}"
        self.time += 1.0
        params = SamplingParams(
            max_new_tokens=len(first_ids) + num_new_tokens,
            seed=0,
            n=n,
            ignore_eos=True,
            first_token_ids=first_ids,
        )
        # Some begin as others do, and some fill their pages.
        further = [7] * (len(self.requests) % 12) if self.num_prefill else []
        prompt = pack_ids([5, 6, *further, len(self.requests) % 90 + 3])
        submit = Submit(b"c", name, prompt, params, True, self.time, self.time)
        self.requests[name] = ClientRequest(submit)
        self.replicas.submit(submit)

    @property
    def open_requests(self) -> list[ClientRequest]:
        return [request for request in self.requests.values() if not request.is_over]

    def resend(self, request: ClientRequest) -> None:
        self.time += 1.0
        submit = msgspec.structs.replace(
            request.submit, client_retry=True, received_at=self.time, tokenized_at=self.time
        )
        self.replicas.submit(submit)
        if request.was_aborted:
            self.replicas.abort(b"c", request.submit.request_id, CLIENT)

    def resend_all(self) -> None:
        for request in self.open_requests:
            for choice in request.choices:
                choice.awaits_replay = True
            self.resend(request)

    def lose_connection(self) -> None:
        self.replicas.lose_client(b"c")
        self.to_client.clear()
        self.resend_all()

    def abort(self, request: ClientRequest) -> None:
        request.was_aborted = True
        self.replicas.abort(b"c", request.submit.request_id, CLIENT)

    def read_client(self) -> bool:
        if not self.to_client:
            return False
        message = decode_chunks(self.to_client.popleft())
        for chunk in message.chunks:
            self.requests[chunk.request_id].take(chunk, isinstance(message, Replay))
        return True

    # --- all of it --------------------------------------------------------------------------------

    def deliver_some(self, turn: int) -> bool:
        """Let one of the processes take one message, or one step."""
        ring = self.rings[turn % len(self.rings)]
        if ring.number in self.lost:
            return self.read_client()
        ways: list[Callable[[], bool]] = [
            partial(ring.read_scheduler, turn // 8),
            ring.run_worker,
            ring.read_detok,
            partial(self.read_delivery, ring),
            self.read_client,
        ]
        start = turn // 3
        return any(ways[(start + offset) % len(ways)]() for offset in range(len(ways)))

    def settle(self) -> None:
        """Let everything happen that is due, and check that all requests have ended."""
        for number in range(len(self.rings)):
            self.restart(number)
        for _ in range(MAX_ROUNDS):
            if not [t for t in range(12 * len(self.rings)) if self.deliver_some(t)]:
                break
        else:
            raise AssertionError("it never comes to rest")
        assert [r.submit.request_id for r in self.open_requests] == []
        for request in self.requests.values():
            request.check()
        assert len(self.replicas.requests) == 0
        for ring in self.rings:
            if ring.number not in self.lost:
                assert len(ring.scheduler.lifecycle.table) == 0
                assert ring.detok.num_open == 0


NUMBERS = st.integers(0, 10_000)
EVENTS = st.lists(st.tuples(st.integers(0, 31), NUMBERS), min_size=10, max_size=120)


def play(
    world: World, events: list[tuple[int, int]], may_rerun: bool = True, forks: bool = False
) -> None:
    """Let drawn events happen.

    Without `may_rerun` nothing dies that has tokens of a request. With `forks` the answers begin
    with given tokens.
    """
    for kind, number in events:
        replica, is_odd = number % len(world.rings), number % 2 == 1
        found = world.open_requests
        if kind < 16:
            for turn in range(number % 7 + 1):
                world.deliver_some(number + 5 * turn)
        elif kind < 20:
            first_ids = [50 + number % 20] * (number % 9) if forks else []
            world.submit(number % 3 + 1, number % 11 + 1, first_ids)
        elif kind < 23 and found and not found[number % len(found)].was_aborted:
            world.resend(found[number % len(found)])
        elif kind == 23 and found and is_odd:
            world.abort(found[number % len(found)])
        elif kind in (24, 25):
            world.recall(replica)
        elif kind == 26:
            world.restart(replica)
        elif not may_rerun:
            continue
        elif kind == 27:
            world.lose_connection()
        elif kind == 28:
            world.kill(replica, "scheduler_proc" if is_odd else "detok_proc", number % 4 == 1)
        elif kind == 29:
            world.restart_frontend()
        elif kind == 30:
            world.lose(replica)
        else:
            world.return_replica(replica)


# The frontend dies, then a scheduler, which restores an older placement than it had reported. Its
# requests run again, and end here twice: the client got neither, when both were in one message.
OLDER_PLACEMENT = [
    (18, 20), (12, 426), (19, 163), (22, 444), (13, 611), (29, 476), (12, 825), (18, 780), (28, 563)
]  # fmt: skip
# A replica ends a request, and is lost before it gets what the client has sent again.
LOST_WITH_END = [
    (18, 6892), (11, 4264), (19, 5204), (1, 7848), (15, 3925), (29, 7450), (3, 6431), (2, 6929),
    (2, 8047), (13, 6933), (10, 7569), (4, 7724), (2, 5450), (30, 2148),
]  # fmt: skip
# What a dead frontend has acknowledged is read after a replay for the next one has begun.
LATE_ACKNOWLEDGEMENT = [
    (18, 7825), (8, 806), (19, 4972), (27, 5103), (27, 3576), (7, 2538), (23, 4299), (29, 4647),
    (14, 3177), (14, 4423), (19, 6944), (3, 2773), (5, 3361), (5, 8410), (1, 885), (10, 3331),
    (10, 3809), (10, 7346), (3, 1720), (15, 4486), (29, 6649), (1, 2970), (3, 9792), (12, 5746),
    (28, 1588),
]  # fmt: skip

# A client comes back while its request waits. The request starts before the replay has its turn.
REPLAY_IN_TURNS = [(18, 6697), (27, 1131)]
# The end of an aborted run of a choice is replayed beside the run that its client has asked for.
TWO_RUNS = [(29, 2126), (29, 4865), (29, 918), (18, 6282), (27, 8715), (0, 4131)]
# A request of this frontend is replayed before the replica has answered it, and is passed over.
EARLY_REPLAY = [
    (29, 2096), (28, 9731), (16, 3039), (26, 5728), (1, 4590), (28, 9636), (28, 8227), (26, 1166),
    (2, 8458), (2, 7180),
]  # fmt: skip
# A choice is withdrawn and begins again, while the end of another waits for its turn.
LATE_WITHDRAWAL = [
    (7, 8861), (19, 9783), (14, 9596), (16, 2651), (15, 507), (8, 7568), (29, 1828), (18, 5411),
    (1, 3160), (23, 2417), (15, 5680), (2, 47), (13, 2318), (17, 4495), (5, 4658), (11, 4843),
    (12, 639), (12, 3712), (21, 4406), (22, 6144), (12, 9826), (13, 1216), (29, 579), (19, 2371),
    (0, 3008), (6, 6039), (28, 6377), (12, 9399),
]  # fmt: skip
# A scheduler dies after it has handed its requests back, then the frontend that has moved them.
LOST_HANDING_BACK = [
    (17, 8429), (17, 9159), (19, 5338), (25, 1282), (13, 3226), (9, 277), (10, 8167), (25, 1685),
    (9, 1406), (12, 6571), (15, 5156), (28, 5025), (1, 2299), (1, 6557), (29, 7431),
]  # fmt: skip


@pytest.mark.parametrize("num_replicas", [1, 2])
@example(REPLAY_IN_TURNS)
@example(TWO_RUNS)
@example(EARLY_REPLAY)
@example(LATE_WITHDRAWAL)
@example(LOST_HANDING_BACK)
@example(OLDER_PLACEMENT)
@example(LOST_WITH_END)
@example(LATE_ACKNOWLEDGEMENT)
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(events=EVENTS)
def test_every_choice_ends_once_with_its_text_whatever_dies(
    num_replicas: int, events: list[tuple[int, int]]
) -> None:
    world = World(num_replicas)
    play(world, events)
    world.settle()


@pytest.mark.parametrize("num_replicas", [1, 2])
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(events=EVENTS)
def test_every_fork_ends_once_with_its_text_whatever_dies(
    num_replicas: int, events: list[tuple[int, int]]
) -> None:
    world = World(num_replicas)
    play(world, events, forks=True)
    world.settle()


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(EVENTS)
def test_recalls_and_requests_sent_again_compute_no_token_twice(
    events: list[tuple[int, int]],
) -> None:
    world = World(3)
    world.settle()
    play(world, events, may_rerun=False)
    world.settle()
    assert world.replicas.requests.num_results_dropped == 0


@pytest.fixture(scope="module", autouse=True)
def loads_ahead() -> Iterator[None]:
    """Let every page of a prompt be loaded ahead that is stored before its last one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_report, "AHEAD_TOKENS", PAGE)
        yield


@pytest.mark.parametrize(("num_replicas", "num_prefill"), [(2, 1), (3, 1), (4, 2)])
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(events=EVENTS)
def test_choices_that_change_their_replica_end_once_with_their_text_whatever_dies(
    num_replicas: int, num_prefill: int, events: list[tuple[int, int]]
) -> None:
    world = World(num_replicas, num_prefill=num_prefill)
    play(world, events)
    world.settle()


def test_a_prompt_is_computed_at_one_replica_and_its_tokens_at_another() -> None:
    world = World(2, num_prefill=1)
    world.settle()
    for _ in range(24):
        world.submit(1, 40, [])
    world.settle()
    prefill, decode = (ring.scheduler.lifecycle for ring in world.rings)
    assert decode.stats.ended["length"] >= 12, "most are handed over before their end"
    assert decode.offload_stats.fetched_pages > 0
    assert world.num_loaded_ahead > 0
    assert prefill.offload_stats.fetched_pages == 0
    assert world.replicas.requests.num_results_dropped == 0
