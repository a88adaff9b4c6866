"""A live view of a real scheduler that has too little for its load."""

import random

import msgspec

from quadriga.server.config.engine_args import SchedulerArgs
from quadriga.wire.live import LiveProcess, LiveServer, LiveStep
from quadriga.wire.to_detok import LiveFrame
from quadriga.wire.to_scheduler import WatchSteps
from tests.browser import Page
from tests.unit.scripted_ring import ScriptedRing
from tests.unit.simulation import World, submit

NUM_REQUESTS, NUM_STEPS = 200, 120


def real_steps() -> list[LiveStep]:
    """Return the messages of a real scheduler that has too few slots and pages for its load."""
    messages: list[LiveStep] = []

    def observe(_: str, message: msgspec.Struct) -> None:
        if isinstance(message, LiveFrame):
            messages.append(msgspec.msgpack.decode(message.frame, type=LiveStep))

    args = SchedulerArgs(
        max_running_requests=48, max_batch_size=48, chunked_prefill_size=256, batch_mode="mixed",
        schedule_conservativeness=0.05,
    )  # fmt: skip
    world = World(args, num_pages=500, observe=observe)
    world.checked = False
    world.send(WatchSteps(30.0, is_new=True))
    rng = random.Random(3)
    for number in range(NUM_REQUESTS):
        prompt = [9] * 40 + [rng.randrange(3, 90) for _ in range(rng.randrange(8, 160))]
        world.send(submit(f"request-{number}", prompt, rng.randrange(60, 200), ignore_eos=True))
    for _ in range(NUM_STEPS):
        world.step()
    return messages


def live_ring() -> ScriptedRing:
    ring = ScriptedRing([])
    for step in real_steps():
        ring.live.put_nowait(step)
    process = LiveProcess("worker_proc", 42, 5.0, 300 << 20, 1.0)
    ring.live.put_nowait(LiveServer(1001.0, [process], 0, 200, 1, 0))
    return ring


async def until_live(page: Page) -> None:
    await page.until("document.querySelector('.processes')?.innerText.includes('300 MiB')")
