"""A scheduler that dies is followed by one that has read the journal, and nothing is lost."""

import dataclasses
import random
from pathlib import Path

import msgspec
import pytest

from quadriga.messages.to_scheduler import DetokReady, Leave, Submit
from quadriga.scheduler_args import SchedulerArgs
from scheduler_proc.journal import FILE_NAME, open_journal
from scheduler_proc.scheduler import Scheduler
from tests.unit.simulation import EOS, World, abort, reference, submit


class MortalWorld(World):
    """A world whose scheduler may die and be followed by another."""

    def __init__(self, args: SchedulerArgs, directory: Path) -> None:
        super().__init__(args)
        self._args = dataclasses.replace(args, journal=str(directory))
        self.follow()

    def follow(self) -> None:
        """The scheduler is gone; another one takes over, with a worker and a detokenizer that were
        told to forget what they know."""
        self._detok_sessions += 1
        journal, found = open_journal(self._args, Path("run"))
        self.scheduler = Scheduler(
            self._args,
            frozenset({EOS}),
            self.worker,
            self.detok,
            lambda: self.worker.now,
            journal,
        )
        self.scheduler.arrivals.take_up(found)
        self.worker.die()
        self.detok.session = self._detok_sessions
        self.detok.open.clear()
        self.detok.ended.clear()
        ready = msgspec.structs.replace(self._ready, session=self.worker.session)
        self.scheduler.iterate([DetokReady(self.detok.session)], [ready])
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
        generated += world.scheduler.statistics.generation_tokens
        world.follow()
    world.run()
    generated += world.scheduler.statistics.generation_tokens
    for name, prompt in prompts.items():
        assert world.detok.tokens[name] == reference(prompt, 12, True)
        assert world.detok.closed[name].finish_reason == "length"
    assert generated == 6 * 12, "no token was computed twice"
    assert world.scheduler.info()["pages_held"] == 0
    world.tell(Leave())
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
    again = msgspec.structs.replace(submit("early", [5], 2, ignore_eos=True), resent=True)
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
        return [msgspec.structs.replace(accepted[n], resent=True, **how) for n in names]

    for number in range(200):
        match chosen.randrange(13):
            case 0:
                world.follow()
                world.tell(*asked_again(world.detok.unanswered, again=True))  # by the front door
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
