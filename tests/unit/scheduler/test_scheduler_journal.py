"""A scheduler that crashes is followed by one that reads the journal, and nothing is lost."""

import errno
import random
from pathlib import Path

import msgspec
import pytest

from quadriga.server.config.engine_args import SchedulerArgs
from quadriga.wire.packing import pack_ids
from quadriga.wire.to_detok import PROMPT_END_TOKENS, StepOutput, StreamStart
from quadriga.wire.to_scheduler import Shutdown, Submit
from scheduler_proc.journal.writer import FILE_NAME, RETRY_INTERVAL_S
from tests.unit.journal_runs import FaultyOs, MortalWorld, faulty_os, full_disk, release_journal
from tests.unit.simulation import abort, reference, submit


def test_streams_go_on_from_their_last_token_when_the_scheduler_crashes(tmp_path: Path) -> None:
    world = MortalWorld(SchedulerArgs(max_batch_size=3), tmp_path)
    prompts = {f"r{n}": [n + 3] * (3 * n + 1) for n in range(6)}
    world.send(*(submit(name, prompt, 12, ignore_eos=True) for name, prompt in prompts.items()))
    generated = 0
    for _ in range(5):
        for _ in range(4):
            world.step()
        generated += world.scheduler.lifecycle.stats.generation_tokens
        world.restart_scheduler()
    world.run()
    generated += world.scheduler.lifecycle.stats.generation_tokens
    for name, prompt in prompts.items():
        assert world.detok.tokens[name] == reference(prompt, 12, True)
        assert world.detok.closed[name].finish_reason == "length"
    assert generated == 6 * 12, "no token was computed twice"
    assert world.scheduler.info()["pages_held"] == 0
    world.send(Shutdown())
    assert world.scheduler.stopped
    assert not (tmp_path / FILE_NAME).exists()


@pytest.mark.parametrize("length", [3, PROMPT_END_TOKENS + 5])
def test_the_detokenizer_gets_the_end_of_a_prompt_that_is_continued_after_every_crash(
    tmp_path: Path, length: int
) -> None:
    world = MortalWorld(SchedulerArgs(), tmp_path)
    seen: list[StreamStart] = []
    send = world.detok.send

    def observed(message: msgspec.Struct) -> None:
        if isinstance(message, StepOutput):
            seen.extend([*message.opened, *(replay.opening for replay in message.replayed)])
        send(message)

    world.detok.send = observed  # type: ignore[method-assign]
    prompt = list(range(3, 3 + length))
    text = submit("text", prompt, 12, ignore_eos=True)
    chat = submit("chat", prompt, 12, ignore_eos=True)
    continued = msgspec.structs.replace(text.params, continues_prompt=True)
    world.send(msgspec.structs.replace(text, params=continued), chat)
    for _ in range(4):
        world.step()
    world.restart_scheduler()
    world.step()
    world.kill_detok()
    world.restart_detok()
    world.run()
    ends = {
        name: {getattr(start, "prompt_end", b"") for start in seen if start.request_id == name}
        for name in ("text", "chat")
    }
    assert ends == {"text": {pack_ids(prompt[-PROMPT_END_TOKENS:])}, "chat": {b""}}
    assert len(seen) == 2 * 3


def test_a_client_gets_an_empty_replay_where_no_token_was_journaled(tmp_path: Path) -> None:
    world = MortalWorld(SchedulerArgs(), tmp_path)
    world.send(submit("a", [5], 3, ignore_eos=True))
    world.restart_scheduler()
    (replay,) = world.detok.replayed
    assert (replay.opening.request_id, replay.token_ids) == ("a", b"")
    world.run()
    assert world.detok.tokens["a"] == reference([5], 3, True)


def test_an_unacknowledged_end_is_replayed_and_an_acknowledged_one_only_on_demand(
    tmp_path: Path,
) -> None:
    world = MortalWorld(SchedulerArgs(), tmp_path)
    world.send(submit("early", [5], 2, ignore_eos=True))
    world.run()
    world.kill_detok()
    world.send(submit("late", [6], 2, ignore_eos=True))
    world.run()
    assert "late" not in world.detok.closed
    world.detok.replayed.clear()
    world.restart_scheduler()
    assert [replay.opening.request_id for replay in world.detok.replayed] == ["late"]
    assert world.detok.tokens["late"] == reference([6], 2, True)
    retry = msgspec.structs.replace(submit("early", [5], 2, ignore_eos=True), client_retry=True)
    steps = world.worker.rows_of_steps
    before = len(steps)
    world.send(retry)
    assert world.detok.replayed[-1].opening.request_id == "early"
    assert len(steps) == before, "it does not run twice"


def test_request_numbers_are_never_reused(tmp_path: Path) -> None:
    world = MortalWorld(SchedulerArgs(), tmp_path)
    world.send(submit("a", [5], 5, ignore_eos=True))
    world.step()
    world.restart_scheduler()
    world.send(submit("b", [6], 5, ignore_eos=True))
    world.run()
    assert world.detok.closed["a"].seq != world.detok.closed["b"].seq


@pytest.mark.parametrize("seed", range(8))
def test_lives_of_random_schedulers(tmp_path: Path, seed: int) -> None:
    source = random.Random(seed)
    world = MortalWorld(SchedulerArgs(max_batch_size=4, max_running_requests=6), tmp_path)
    accepted: dict[str, Submit] = {}
    aborted: set[str] = set()

    def retries(names: set[str], **how: bool) -> list[Submit]:
        return [msgspec.structs.replace(accepted[n], client_retry=True, **how) for n in names]

    for number in range(200):
        match source.randrange(13):
            case 0:
                world.restart_scheduler()
                world.send(*retries(world.detok.awaiting_replay, frontend_retry=True))
            case 1 | 2 | 3:
                prompt = [source.randrange(3, 90) for _ in range(source.randrange(1, 30))]
                message = submit(f"r{number}", prompt, source.randrange(1, 20))
                accepted[message.request_id] = message
                world.send(message)
            case 4 if accepted:
                name = source.choice(list(accepted))
                if name not in world.detok.closed:
                    aborted.add(name)
                world.send(abort(name))
            case 5:
                world.kill_detok()
            case 6:
                world.restart_detok()
            case 7 if accepted:
                asked = {source.choice(list(accepted)) for _ in range(3)} - aborted
                world.detok.awaiting_replay |= asked
                world.send(*retries(asked))
            case _:
                world.step()
    world.restart_detok()
    world.run()
    assert set(world.detok.closed) == set(accepted)
    assert not world.detok.awaiting_replay
    for name, message in accepted.items():
        expected = reference(
            list(memoryview(message.prompt_ids).cast("i")),
            message.params.max_new_tokens or 0,
            False,
        )
        got = world.detok.tokens.get(name, [])
        assert got == expected[: len(got)]
        assert got == expected or name in aborted


class Frontend:
    """Send the open requests again to each new scheduler: the journal of the world may be lost."""

    def __init__(self, world: MortalWorld) -> None:
        self.world = world
        self.accepted: dict[str, Submit] = {}
        world.detok.may_lose_work = True

    def submit(self, name: str, prompt: list[int], max_new_tokens: int) -> None:
        self.accepted[name] = message = submit(name, prompt, max_new_tokens, ignore_eos=True)
        self.world.send(message)

    def restart_scheduler(self) -> None:
        self.world.restart_scheduler()
        still_open = self.accepted.keys() - self.world.detok.closed.keys()
        for name in sorted(still_open):
            self.world.send(msgspec.structs.replace(self.accepted[name], frontend_retry=True))

    def finish(self) -> None:
        """Check that every request ended with all of its tokens. The detokenizer checks: once."""
        self.world.run()
        assert self.world.detok.closed.keys() == self.accepted.keys()
        for name, message in self.accepted.items():
            prompt = list(memoryview(message.prompt_ids).cast("i"))
            expected = reference(prompt, message.params.max_new_tokens or 0, True)
            assert self.world.detok.tokens[name] == expected
            assert self.world.detok.closed[name].finish_reason == "length"


def test_a_scheduler_that_crashes_while_the_disk_is_full_loses_nothing(tmp_path: Path) -> None:
    with faulty_os() as faulty:
        frontend = Frontend(world := MortalWorld(SchedulerArgs(max_batch_size=3), tmp_path))
        for number in range(4):
            frontend.submit(f"early{number}", [number + 3] * 5, 4 * number + 4)
        world.step()
        faulty.fails = full_disk
        for number in range(4):
            frontend.submit(f"late{number}", [number + 9] * 5, 9)
        while "early0" not in world.detok.closed:
            world.step()
        assert world.scheduler.info()["journal"] == "failed"
        seqs = {closed.seq for closed in world.detok.closed.values()}
        for _ in range(3):
            frontend.restart_scheduler()
            assert world.scheduler.info()["journal"] == "failed"
            for _ in range(4):
                world.step()
        faulty.fails = lambda _name, _number: 0
        world.worker.now += RETRY_INTERVAL_S
        frontend.submit("last", [5], 9)
        assert world.scheduler.info()["journal"] == "on"
        frontend.restart_scheduler()
        frontend.finish()
    ends = [closed.seq for closed in world.detok.closed.values()]
    assert len(set(ends)) == len(ends), "a number is never reused"
    assert min(set(ends) - seqs) > max(seqs)


def test_a_request_id_that_is_reused_does_not_get_the_answer_of_a_stale_journal(
    tmp_path: Path,
) -> None:
    with faulty_os() as faulty:
        frontend = Frontend(world := MortalWorld(SchedulerArgs(), tmp_path))
        frontend.submit("a", [5] * 3, 6)
        world.step()
        faulty.fails = full_disk
        world.run()
        assert "a" in world.detok.closed
        del world.detok.closed["a"], world.detok.tokens["a"]
        frontend.submit("a", [6] * 3, 7)
        world.step()
        frontend.restart_scheduler()
        frontend.finish()


@pytest.mark.parametrize("seed", range(12))
def test_lives_of_random_schedulers_with_a_disk_that_fails(tmp_path: Path, seed: int) -> None:
    source = random.Random(seed)
    with faulty_os() as faulty:
        args = SchedulerArgs(max_batch_size=4, max_running_requests=6)
        frontend = Frontend(world := MortalWorld(args, tmp_path))
        states = set()
        for number in range(200):
            match source.randrange(12):
                case 0:
                    frontend.restart_scheduler()
                case 1 | 2 | 3:
                    prompt = [source.randrange(3, 90) for _ in range(source.randrange(1, 30))]
                    frontend.submit(f"r{number}", prompt, source.randrange(1, 20))
                case 4:
                    _break_or_mend(faulty, source)
                case 5:
                    world.worker.now += source.choice([0.1, RETRY_INTERVAL_S])
                case _:
                    world.step()
            states.add(world.scheduler.info()["journal"])
        assert states == {"on", "failed"}
        faulty.fails = lambda _name, _number: 0
        frontend.restart_scheduler()
        assert world.scheduler.info()["journal"] == "on"
        frontend.finish()
    release_journal(world.journal)


def _break_or_mend(faulty: FaultyOs, source: random.Random) -> None:
    """Change what fails. The file can always be marked, or a later scheduler would resume it."""
    match source.randrange(3):
        case 0:
            faulty.fails = full_disk
        case 1:
            call = source.choice(["write", "replace", "fdatasync", "fsync", "dup"])
            faulty.fails = lambda name, _number: errno.EIO if name == call else 0
        case _:
            faulty.fails = lambda _name, _number: 0
