"""A scheduler that dies is followed by one that has read the journal, and nothing is lost."""

import dataclasses
import errno
import random
from pathlib import Path

import msgspec
import pytest

from quadriga.config.scheduler_args import SchedulerArgs
from quadriga.wire.messages.to_scheduler import DetokReady, Shutdown, Submit
from scheduler_proc.durability.journal import RETRY_INTERVAL_S, Journal, NoJournal
from scheduler_proc.durability.journal_opening import FILE_NAME, open_journal
from scheduler_proc.request_table import first_seq_after_restart
from scheduler_proc.scheduler import Scheduler
from tests.unit.journal_runs import FaultyOs, faulty_os, full_disk, header, release_journal
from tests.unit.simulation import EOS, World, abort, reference, submit


class MortalWorld(World):
    """A world whose scheduler may die and be followed by another."""

    def __init__(self, args: SchedulerArgs, directory: Path) -> None:
        super().__init__(args)
        self._args = dataclasses.replace(args, journal=str(directory))
        self.journal: Journal | NoJournal = NoJournal()
        self._follow(is_restart=False)

    def follow(self) -> None:
        """The scheduler is gone; another one takes over, with a worker and a detokenizer that were
        told to forget what they know."""
        self._follow(is_restart=True)

    def _follow(self, is_restart: bool) -> None:
        self._detok_sessions += 1
        release_journal(self.journal)
        known = header(vocab_size=1000, context_length=1000)
        journal, found = open_journal(self._args, Path("run"), known, is_restart)
        if isinstance(journal, Journal):
            journal._clock = lambda: self.worker.now
        self.journal = journal
        self.scheduler = Scheduler(
            self._args,
            frozenset({EOS}),
            self.worker,
            self.detok,
            lambda: self.worker.now,
            journal,
        )
        self.scheduler.restore(found, first_seq_after_restart() if is_restart else 0)
        self.worker.die()
        self.detok.session = self._detok_sessions
        self.detok.open.clear()
        self.detok.ended.clear()
        ready = msgspec.structs.replace(self._ready, session=self.worker.session)
        self.scheduler.step([DetokReady(self.detok.session)], [ready])
        self._acknowledge()
        self._check()


def test_streams_go_on_from_their_last_token_when_the_scheduler_dies(tmp_path: Path) -> None:
    world = MortalWorld(SchedulerArgs(max_batch_size=3), tmp_path)
    prompts = {f"r{n}": [n + 3] * (3 * n + 1) for n in range(6)}
    world.tell(*(submit(name, prompt, 12, ignore_eos=True) for name, prompt in prompts.items()))
    generated = 0
    for _ in range(5):
        for _ in range(4):
            world.step()
        generated += world.scheduler.stats.generation_tokens
        world.follow()
    world.run()
    generated += world.scheduler.stats.generation_tokens
    for name, prompt in prompts.items():
        assert world.detok.tokens[name] == reference(prompt, 12, True)
        assert world.detok.closed[name].finish_reason == "length"
    assert generated == 6 * 12, "no token was computed twice"
    assert world.scheduler.info()["pages_held"] == 0
    world.tell(Shutdown())
    assert world.scheduler.stopped
    assert not (tmp_path / FILE_NAME).exists()


def test_a_client_hears_that_its_text_begins_anew_where_no_token_was_written_down(
    tmp_path: Path,
) -> None:
    world = MortalWorld(SchedulerArgs(), tmp_path)
    world.tell(submit("a", [5], 3, ignore_eos=True))
    world.follow()
    (told,) = world.detok.replayed
    assert (told.opening.request_id, told.token_ids) == ("a", b"")
    world.run()
    assert world.detok.tokens["a"] == reference([5], 3, True)


def test_an_end_that_was_not_handed_on_is_told_again_and_one_that_was_only_on_demand(
    tmp_path: Path,
) -> None:
    world = MortalWorld(SchedulerArgs(), tmp_path)
    world.tell(submit("early", [5], 2, ignore_eos=True))
    world.run()
    world.lose_detok()
    world.tell(submit("late", [6], 2, ignore_eos=True))
    world.run()
    assert "late" not in world.detok.closed
    world.detok.replayed.clear()
    world.follow()
    assert [replay.opening.request_id for replay in world.detok.replayed] == ["late"]
    assert world.detok.tokens["late"] == reference([6], 2, True)
    again = msgspec.structs.replace(submit("early", [5], 2, ignore_eos=True), client_retry=True)
    steps = world.worker.rows_of_steps
    before = len(steps)
    world.tell(again)
    assert world.detok.replayed[-1].opening.request_id == "early"
    assert len(steps) == before, "it does not run twice"


def test_numbers_are_never_used_again(tmp_path: Path) -> None:
    world = MortalWorld(SchedulerArgs(), tmp_path)
    world.tell(submit("a", [5], 5, ignore_eos=True))
    world.step()
    world.follow()
    world.tell(submit("b", [6], 5, ignore_eos=True))
    world.run()
    assert world.detok.closed["a"].seq != world.detok.closed["b"].seq


@pytest.mark.parametrize("seed", range(8))
def test_lives_of_random_schedulers(tmp_path: Path, seed: int) -> None:
    chosen = random.Random(seed)
    world = MortalWorld(SchedulerArgs(max_batch_size=4, max_running_requests=6), tmp_path)
    accepted: dict[str, Submit] = {}
    aborted: set[str] = set()

    def asked_again(names: set[str], **how: bool) -> list[Submit]:
        return [msgspec.structs.replace(accepted[n], client_retry=True, **how) for n in names]

    for number in range(200):
        match chosen.randrange(13):
            case 0:
                world.follow()
                world.tell(
                    *asked_again(world.detok.unanswered, frontend_retry=True)
                )  # by the front door
            case 1 | 2 | 3:
                prompt = [chosen.randrange(3, 90) for _ in range(chosen.randrange(1, 30))]
                message = submit(f"r{number}", prompt, chosen.randrange(1, 20))
                accepted[message.request_id] = message
                world.tell(message)
            case 4 if accepted:
                name = chosen.choice(list(accepted))
                if name not in world.detok.closed:
                    aborted.add(name)
                world.tell(abort(name))
            case 5:
                world.lose_detok()
            case 6:
                world.replace_detok()
            case 7 if accepted:
                asked = {chosen.choice(list(accepted)) for _ in range(3)} - aborted
                world.detok.unanswered |= asked
                world.tell(*asked_again(asked))
            case _:
                world.step()
    world.replace_detok()
    world.run()
    assert set(world.detok.closed) == set(accepted)
    assert not world.detok.unanswered
    for name, message in accepted.items():
        expected = reference(
            list(memoryview(message.prompt_ids).cast("i")),
            message.params.max_new_tokens or 0,
            False,
        )
        got = world.detok.tokens.get(name, [])
        assert got == expected[: len(got)]
        assert got == expected or name in aborted


class FrontDoor:
    """Requests of a world whose journal may be lost: they are sent again to another scheduler, as
    the front door does with those that are open."""

    def __init__(self, world: MortalWorld) -> None:
        self.world = world
        self.accepted: dict[str, Submit] = {}
        world.detok.may_begin_anew = True

    def submit(self, name: str, prompt: list[int], max_new_tokens: int) -> None:
        self.accepted[name] = message = submit(name, prompt, max_new_tokens, ignore_eos=True)
        self.world.tell(message)

    def follow(self) -> None:
        self.world.follow()
        still_open = self.accepted.keys() - self.world.detok.closed.keys()
        for name in sorted(still_open):
            self.world.tell(msgspec.structs.replace(self.accepted[name], frontend_retry=True))

    def finish(self) -> None:
        """Every request has ended, once (the detokenizer sees to that), with all of its tokens."""
        self.world.run()
        assert self.world.detok.closed.keys() == self.accepted.keys()
        for name, message in self.accepted.items():
            prompt = list(memoryview(message.prompt_ids).cast("i"))
            expected = reference(prompt, message.params.max_new_tokens or 0, True)
            assert self.world.detok.tokens[name] == expected
            assert self.world.detok.closed[name].finish_reason == "length"


def test_a_scheduler_that_dies_while_the_disk_is_full_loses_nothing(tmp_path: Path) -> None:
    with faulty_os() as faulty:
        door = FrontDoor(world := MortalWorld(SchedulerArgs(max_batch_size=3), tmp_path))
        for number in range(4):
            door.submit(f"early{number}", [number + 3] * 5, 4 * number + 4)
        world.step()
        faulty.fails = full_disk
        for number in range(4):
            door.submit(f"late{number}", [number + 9] * 5, 9)
        while "early0" not in world.detok.closed:
            world.step()
        assert world.scheduler.info()["journal"] == "failed"
        seqs = {closed.seq for closed in world.detok.closed.values()}
        for _ in range(3):
            door.follow()
            assert world.scheduler.info()["journal"] == "failed"
            for _ in range(4):
                world.step()
        faulty.fails = lambda _name, _number: 0
        world.worker.now += RETRY_INTERVAL_S
        door.submit("last", [5], 9)
        assert world.scheduler.info()["journal"] == "on"
        door.follow()
        door.finish()
    ends = [closed.seq for closed in world.detok.closed.values()]
    assert len(set(ends)) == len(ends), "a number is never used again"
    assert min(set(ends) - seqs) > max(seqs)


def test_a_request_of_a_name_that_was_used_before_does_not_get_the_stale_one_s_answer(
    tmp_path: Path,
) -> None:
    with faulty_os() as faulty:
        door = FrontDoor(world := MortalWorld(SchedulerArgs(), tmp_path))
        door.submit("a", [5] * 3, 6)
        world.step()
        faulty.fails = full_disk
        world.run()
        assert "a" in world.detok.closed
        del world.detok.closed["a"], world.detok.tokens["a"]
        door.submit("a", [6] * 3, 7)
        world.step()
        door.follow()
        door.finish()


@pytest.mark.parametrize("seed", range(12))
def test_lives_of_random_schedulers_with_a_disk_that_fails(tmp_path: Path, seed: int) -> None:
    chosen = random.Random(seed)
    with faulty_os() as faulty:
        args = SchedulerArgs(max_batch_size=4, max_running_requests=6)
        door = FrontDoor(world := MortalWorld(args, tmp_path))
        states = set()
        for number in range(200):
            match chosen.randrange(12):
                case 0:
                    door.follow()
                case 1 | 2 | 3:
                    prompt = [chosen.randrange(3, 90) for _ in range(chosen.randrange(1, 30))]
                    door.submit(f"r{number}", prompt, chosen.randrange(1, 20))
                case 4:
                    _break_or_mend(faulty, chosen)
                case 5:
                    world.worker.now += chosen.choice([0.1, RETRY_INTERVAL_S])
                case _:
                    world.step()
            states.add(world.scheduler.info()["journal"])
        assert states == {"on", "failed"}
        faulty.fails = lambda _name, _number: 0
        door.follow()
        assert world.scheduler.info()["journal"] == "on"
        door.finish()
    release_journal(world.journal)


def _break_or_mend(faulty: FaultyOs, chosen: random.Random) -> None:
    """What needs no room works: without it nothing tells a later scheduler that the file is
    stale."""
    match chosen.randrange(3):
        case 0:
            faulty.fails = full_disk
        case 1:
            call = chosen.choice(["write", "replace", "fdatasync", "fsync", "dup"])
            faulty.fails = lambda name, _number: errno.EIO if name == call else 0
        case _:
            faulty.fails = lambda _name, _number: 0
