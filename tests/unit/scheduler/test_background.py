"""Requests of the smallest priority, such as lines of batches, pause beside others."""

import pytest

from quadriga.server.config.engine_args import BATCH_MODES, SchedulerArgs
from quadriga.wire.to_scheduler import Submit
from tests.unit.simulation import World, reference, submit

LOWEST = -1000


def line(name: str, prompt: list[int], max_new_tokens: int) -> Submit:
    return submit(name, prompt, max_new_tokens, ignore_eos=True, priority=LOWEST)


def progress_of(world: World, name: str) -> int:
    """Return how many tokens a request has, -1 for one that has ended."""
    requests = world.scheduler.lifecycle.table.of_client(b"c", name)
    return requests[0].num_generated if requests else -1


@pytest.mark.parametrize("mode", BATCH_MODES)
@pytest.mark.parametrize(("beside", "chunk"), [(0, 4), (0, 64), (1, 64)])
def test_lines_pause_while_others_run_and_go_on_afterwards(
    mode: str, beside: int, chunk: int
) -> None:
    args = SchedulerArgs(
        batch_mode=mode, batch_concurrency_beside=beside, chunked_prefill_size=chunk
    )
    world = World(args, num_pages=256)
    lines = ("l0", "l1", "l2")
    world.send(*(line(name, [9 + n] * 4, 60) for n, name in enumerate(lines)))
    for _ in range(12):
        world.step()
    world.send(submit("other", [7] * 24, 20, ignore_eos=True))
    while progress_of(world, "other") < 2:
        world.step()
    before = [progress_of(world, name) for name in lines]
    assert min(before) > 0
    while progress_of(world, "other") >= 0:
        between = [progress_of(world, name) for name in lines]
        world.step()
    num_tokens = sum(between) - sum(before)
    assert num_tokens <= beside * 20
    assert bool(num_tokens) == bool(beside)
    world.run()
    assert len(world.detok.closed) == 4
    for n, name in enumerate(lines):
        assert world.detok.tokens[name] == reference([9 + n] * 4, 60, ignore_eos=True)


def test_lines_give_their_pages_to_others_first() -> None:
    args = SchedulerArgs(schedule_conservativeness=0.01)
    world = World(args, num_pages=12, page_size=4)
    world.send(line("line", [9] * 4, 24))
    for _ in range(16):
        world.step()
    num_before = progress_of(world, "line")
    world.send(*(submit(name, [5 + n] * 4, 20, ignore_eos=True) for n, name in enumerate("ab")))
    while world.step():
        if world.scheduler.lifecycle.core.num_retractions:
            break
    assert num_before > 8
    (retracted,) = world.scheduler.lifecycle.table.of_client(b"c", "line")
    assert retracted.num_retractions == 1
