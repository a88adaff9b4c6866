"""Pages beyond the pool: which are stored and loaded, and that requests get their own tokens.

The simulated worker checks that each token sees the KV of its own text, so that a page which was
loaded to the wrong place, too late, or not at all is noticed.
"""

import random

import msgspec
import pytest

from quadriga.server.config.engine_args import SchedulerArgs
from quadriga.server.prefix_blocks import page_hash
from quadriga.wire.packing import pack_ids
from quadriga.wire.to_detok import MovableChoice
from quadriga.wire.to_scheduler import ChoiceProgress, LoadAhead, Submit
from quadriga.wire.worker import StoredPages
from scheduler_proc.observe.replica_report import ReplicaReport
from tests.unit.chaos import random_life
from tests.unit.simulated_tiers import TieredWorker, TieredWorld
from tests.unit.simulation import World, abort, reference, submit

PROMPT = [3 + i % 90 for i in range(41)]  # ten pages of four tokens, and a token


class LosslessWorker(TieredWorker):
    """Loses no page."""

    def __init__(self, page_size: int, window: int = 0) -> None:
        super().__init__(page_size, window)
        self.source.random = lambda: 0.99  # type: ignore[method-assign]


class LosslessWorld(TieredWorld):
    worker_class = LosslessWorker


class StoringWorld(LosslessWorld):
    """Stores each page before the next step."""

    def step(self) -> bool:
        while self._transfer():
            pass
        return super().step()


def finish(world: TieredWorld, request: Submit) -> int:
    """Run a request to its end, check its tokens, and return how many of its prompt were cached."""
    world.send(request)
    world.run()
    assert request.params.max_new_tokens is not None
    name, prompt = request.request_id, list(memoryview(request.prompt_ids).cast("i"))
    expected = reference(prompt, request.params.max_new_tokens, request.params.ignore_eos)
    assert world.detok.tokens[name] == expected
    return world.detok.closed[name].cached_tokens


@pytest.mark.parametrize("number", range(20))
def test_lives_of_random_servers_with_a_tier(number: int) -> None:
    method = ("none", "ngram")[number % 2]
    source = random.Random(f"tier/{number}")
    random_life(
        source, 120, world_class=TieredWorld, speculative_method=method, suspends=number % 3 == 0
    )


def test_running_requests_of_a_suspended_worker_find_their_pages_in_the_tier() -> None:
    world = LosslessWorld(SchedulerArgs())
    prompts = {"a": PROMPT, "b": PROMPT[::-1]}
    world.send(*(submit(name, prompt, 30, ignore_eos=True) for name, prompt in prompts.items()))
    while min(map(len, world.detok.tokens.values()), default=0) < 10:
        world.step()
    num_loaded = world.worker.num_loaded
    world.suspend_worker()
    world.run()
    num_pages = 2 * (len(PROMPT) + 10) // 4 - 2
    assert world.worker.num_loaded - num_loaded >= num_pages - 2
    for name, prompt in prompts.items():
        assert world.detok.tokens[name] == reference(prompt, 30, True)


def test_a_prompt_is_loaded_after_its_pages_were_evicted() -> None:
    world = LosslessWorld(SchedulerArgs(), num_pages=12)
    assert finish(world, submit("first", PROMPT, 2)) == 0
    assert finish(world, submit("other", [7] * 45, 2)) == 0
    assert finish(world, submit("again", PROMPT, 2)) == 40
    info = world.scheduler.info()
    assert info["kv_offload_loaded_tokens_total"] == 4 * world.worker.num_loaded > 0
    assert info["kv_offload_missed_pages_total"] == 0


def test_a_new_worker_loads_what_the_tier_still_has() -> None:
    world = LosslessWorld(SchedulerArgs())
    finish(world, submit("first", PROMPT, 2))
    world.restart_worker()
    assert finish(world, submit("again", [*PROMPT, 5, 6], 2)) == 40


@pytest.mark.parametrize(
    ("world_class", "num_again"),
    [
        pytest.param(World, len(PROMPT) + 30, id="all that was computed"),
        pytest.param(StoringWorld, 3, id="with a tier only the page that was not full"),
    ],
)
def test_a_request_computes_again_what_no_tier_has_when_its_worker_dies(
    world_class: type[World], num_again: int
) -> None:
    world = world_class(SchedulerArgs(speculative_method="none"))
    world.send(submit("only", PROMPT, 60, ignore_eos=True))
    while len(world.detok.tokens.get("only", ())) < 30:
        assert world.step()
    world.restart_worker()
    world.run()
    assert world.detok.tokens["only"] == reference(PROMPT, 60, ignore_eos=True)
    num_computed = sum(map(sum, world.worker.tokens_of_steps))
    assert num_computed - (len(PROMPT) + 59) == num_again


def test_requests_with_one_prefix_share_a_load() -> None:
    world = LosslessWorld(SchedulerArgs(), num_pages=40)
    finish(world, submit("first", PROMPT, 2))
    world.restart_worker()
    world.send(*(submit(f"r{i}", [*PROMPT, 5 + i], 2) for i in range(4)))
    world.run()
    assert [world.detok.closed[f"r{i}"].cached_tokens for i in range(4)] == [40] * 4
    assert world.worker.num_loaded == 10


def test_other_requests_run_while_one_waits_for_its_pages() -> None:
    world = LosslessWorld(SchedulerArgs())
    finish(world, submit("first", PROMPT, 2))
    world.restart_worker()
    world.send(submit("again", PROMPT, 2))
    world.send(submit("other", [9, 9, 9], 2, ignore_eos=True))
    while world.worker.done_at is not None or world.scheduler.pipeline.idle:
        super(TieredWorld, world).step()  # without transfers
        if "other" in world.detok.closed:
            break
    assert "again" not in world.detok.tokens
    world.run()
    assert world.detok.closed["again"].cached_tokens == 40


def test_a_request_that_is_aborted_while_it_waits_leaves_its_pages_to_the_next_one() -> None:
    world = LosslessWorld(SchedulerArgs())
    finish(world, submit("first", PROMPT, 2))
    world.restart_worker()
    world.send(submit("gone", PROMPT, 2))
    world.pass_batch_delay()
    assert len(world.scheduler.lifecycle.core.offload.loads) == 1
    world.send(abort("gone"))
    assert finish(world, submit("again", PROMPT, 2)) == 40
    assert world.worker.num_loaded == 10


def test_pages_of_other_salts_are_not_loaded() -> None:
    world = LosslessWorld(SchedulerArgs())
    finish(world, submit("first", PROMPT, 2, cache_salt="a"))
    world.restart_worker()
    assert finish(world, submit("other", PROMPT, 2, cache_salt="b")) == 0
    assert finish(world, submit("same", PROMPT, 2, cache_salt="a")) == 40


def test_a_load_ends_at_the_first_page_that_is_gone() -> None:
    world = LosslessWorld(SchedulerArgs())
    finish(world, submit("first", PROMPT, 2))
    world.restart_worker()
    name = b""
    for index in range(5):
        tokens = memoryview(submit("", PROMPT).prompt_ids)[16 * index : 16 * index + 16]
        name = page_hash(name, bytes(tokens))
    del world.worker.tier[name]  # the fifth page; the scheduler does not know that it is lost
    assert finish(world, submit("again", PROMPT, 2)) == 16
    assert world.scheduler.info()["kv_offload_missed_pages_total"] == 1
    assert name in world.worker.tier, "it was computed again, and stored"


# --- pages of other replicas ----------------------------------------------------------------------


class FetchingWorker(LosslessWorker):
    """Has no tier of its own, and loads what another worker has stored."""

    fetches = True

    def stored_names(self) -> None:  # type: ignore[override]
        return None


class FetchingWorld(StoringWorld):
    worker_class = FetchingWorker


def moved(name: str, prompt: list[int], tokens: list[int], max_new_tokens: int) -> Submit:
    """Return a request that goes on at another scheduler with some tokens."""
    begun = submit(name, prompt, max_new_tokens, ignore_eos=True)
    progress = [ChoiceProgress(0, pack_ids(tokens), 5.0, 4.0, 3)]
    return msgspec.structs.replace(begun, frontend_retry=True, progress=progress)


def prefilled(prompt: list[int]) -> LosslessWorld:
    """Return a world that has computed a prompt and stored its pages."""
    world = LosslessWorld(SchedulerArgs())
    finish(world, submit("first", prompt, 2, ignore_eos=True))
    return world


def test_a_request_goes_on_from_the_pages_that_another_worker_has_stored() -> None:
    world = FetchingWorld(SchedulerArgs())
    world.worker.tier = dict(prefilled(PROMPT).worker.tier)
    tokens = reference(PROMPT, 9, ignore_eos=True)
    world.send(moved("a", PROMPT, tokens[:1], 9))
    world.run()
    assert world.detok.tokens["a"] == tokens
    assert world.worker.num_loaded == 10
    assert sum(map(sum, world.worker.tokens_of_steps)) == len(PROMPT) + 1 + 8 - 40 - 1
    closed = world.detok.closed["a"]
    assert (closed.admitted_at, closed.cached_tokens) == (4.0, 3), "as it was where it began"
    world.send(submit("new", PROMPT[::-1], 2))
    world.run()
    assert world.worker.num_loaded == 10, "only a request with tokens was computed elsewhere"


def test_what_is_missing_of_a_moved_request_is_computed() -> None:
    world = FetchingWorld(SchedulerArgs())
    tier = prefilled(PROMPT).worker.tier
    world.worker.tier = dict(list(tier.items())[:4])
    tokens = reference(PROMPT, 9, ignore_eos=True)
    world.send(moved("a", PROMPT, tokens[:1], 9))
    world.run()
    assert world.detok.tokens["a"] == tokens
    assert world.worker.num_loaded == 4
    assert world.scheduler.info()["kv_offload_missed_pages_total"] == 1


def test_pages_of_a_moved_request_are_loaded_beside_a_long_prompt() -> None:
    world = FetchingWorld(SchedulerArgs(chunked_prefill_size=8))
    world.worker.tier = dict(prefilled(PROMPT).worker.tier)
    world.send(submit("long", [9, *range(3, 90)] * 2, 2, ignore_eos=True))
    world.pass_batch_delay()
    world.send(moved("a", PROMPT, reference(PROMPT, 1, ignore_eos=True), 30))
    while "long" not in world.detok.tokens:
        assert world.step()
    assert world.worker.num_loaded == 10
    assert len(world.detok.tokens["a"]) > 1
    world.run()
    assert world.detok.tokens["a"] == reference(PROMPT, 30, ignore_eos=True)


def beginning(prompt: list[int], num_tokens: int, salt: str = "") -> LoadAhead:
    return LoadAhead(pack_ids(prompt[:num_tokens]), salt)


def test_pages_are_loaded_while_others_of_the_prompt_are_computed() -> None:
    world = FetchingWorld(SchedulerArgs())
    tier = prefilled(PROMPT).worker.tier
    world.worker.tier = dict(list(tier.items())[:6])
    world.send(beginning(PROMPT, 24))
    world.run()
    assert world.worker.num_loaded == 6
    world.worker.tier = dict(tier)
    world.send(beginning(PROMPT, 36), beginning(PROMPT, 39))
    world.run()
    assert world.worker.num_loaded == 9
    tokens = reference(PROMPT, 9, ignore_eos=True)
    world.send(moved("a", PROMPT, tokens[:1], 9))
    world.run()
    assert world.detok.tokens["a"] == tokens
    assert world.worker.num_loaded == 10
    world.send(beginning(PROMPT, 40, salt="another"))
    world.run()
    info = world.scheduler.info()
    assert info["pages_held"] == info["kv_offload_missed_pages_total"] == 0


def test_a_request_waits_for_pages_that_are_being_loaded_for_it() -> None:
    world = FetchingWorld(SchedulerArgs())
    world.worker.tier = dict(prefilled(PROMPT).worker.tier)
    tokens = reference(PROMPT, 9, ignore_eos=True)
    world.send(beginning(PROMPT, 36), moved("a", PROMPT, tokens[:1], 9))
    world.run()
    assert world.detok.tokens["a"] == tokens
    assert world.worker.num_loaded == 10


def test_a_prompt_is_loaded_ahead_only_where_there_is_room() -> None:
    world = FetchingWorld(SchedulerArgs(), num_pages=19)
    world.worker.tier = dict(prefilled(PROMPT).worker.tier)
    world.send(beginning(PROMPT, 40))
    world.run()
    assert world.worker.num_loaded == 0
    world.send(beginning(PROMPT, 36))
    world.run()
    assert world.worker.num_loaded == 9
    others = [submit(f"r{n}", [9 + n] * 30, 20, ignore_eos=True) for n in range(4)]
    world.send(*others)  # they need all pages
    world.run()
    assert len(world.detok.closed) == 4 and world.scheduler.info()["pages_held"] == 0


class PrefillWorld(StoringWorld):
    """Computes prompts for other replicas."""

    def __init__(self, args: SchedulerArgs, num_pages: int = 64) -> None:
        super().__init__(args, num_pages)
        self.scheduler.lifecycle.report = ReplicaReport(notes_steps=True, hands_over=True)

    @property
    def movable(self) -> list[MovableChoice]:
        """The requests that can move, as they were reported."""
        return self.detok.movable


def test_a_request_can_move_once_all_pages_of_its_prompt_are_stored() -> None:
    world = PrefillWorld(SchedulerArgs())
    world.send(submit("a", PROMPT, 60, ignore_eos=True))
    while len(world.detok.tokens.get("a", ())) < 5:
        assert super(TieredWorld, world).step()  # without transfers
    assert world.movable == []
    while not world.movable:
        assert world._transfer()
    (choice,) = world.movable
    assert len(world.worker.tier) >= 10
    assert choice.admitted_at > 0 and choice.cached_tokens == 0
    for _ in range(20):
        world.step()
    assert len(world.movable) == 1, "it is reported once"
    world.scheduler.lifecycle.report.restate()
    world.step()
    world.step()
    assert [each.seq for each in world.movable] == [choice.seq] * 2


def test_what_can_be_loaded_of_a_prompt_is_reported_while_it_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("scheduler_proc.observe.replica_report.AHEAD_TOKENS", 8)
    world = PrefillWorld(SchedulerArgs(chunked_prefill_size=8))
    world.send(submit("a", PROMPT, 20, ignore_eos=True))
    world.run()
    stored = world.detok.stored
    assert [(each.request_id, each.index) for each in stored] == [("a", 0)] * len(stored)
    counts = [each.num_tokens for each in stored]
    assert counts == sorted({*counts}) and counts[0] >= 8 and 24 <= counts[-1] <= 40
    world.send(submit("b", PROMPT, 20, ignore_eos=True), submit("c", PROMPT[:7], 20))
    world.run()
    assert {each.request_id for each in stored} == {"a", "b"}, "c is too short"


def test_pages_that_made_room_for_others_are_stored_once_more() -> None:
    world = PrefillWorld(SchedulerArgs(), num_pages=200)
    finish(world, submit("first", PROMPT, 2, ignore_eos=True))
    world.movable.clear()
    lost = list(world.worker.tier)[2]
    del world.worker.tier[lost]
    world.schedule([], [StoredPages(b"", lost, world.worker.session)])
    world.send(submit("again", PROMPT, 60, ignore_eos=True))
    while not world.movable:
        assert world.step()
    assert lost in world.worker.tier
