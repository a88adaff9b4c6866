"""Measures what a step costs that computes guesses, for the scheduler's choice of their number."""

import logging
import math
import time
from typing import TYPE_CHECKING, NamedTuple

from quadriga.config.server_config import ServerConfig
from quadriga.wire.messages.worker import StepCost
from worker_proc.speculation.guesser import Guesser
from worker_proc.speculation.self_draft import SelfDrafter
from worker_proc.startup.dummy_plans import decode_plan, prefill_plan, release_plan

if TYPE_CHECKING:
    from worker_proc.runner import Runner

# Tokens of a step: most of them where steps begin to take longer with each further token.
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 64)
NUM_TRIES = 5  # the fastest one of a size counts
MIN_TRIES = 2
MAX_MEASURING_S = 0.5  # no further try of the sizes begins after that


class GuessCosts(NamedTuple):
    """Seconds of steps by their number of tokens.

    Attributes:
        steps: That verify guesses; empty: nothing will be guessed.
        drafts: That draft guesses; empty: no step does.
    """

    steps: list[StepCost]
    drafts: list[StepCost]


NO_GUESSES = GuessCosts([], [])


def prepare_guesses(runner: "Runner", config: ServerConfig, num_ranks: int) -> GuessCosts:
    """Let the runner guess tokens, if the flags ask for it and the engine can."""
    method = config.scheduler.speculative_method
    if method == "none":
        return NO_GUESSES
    if reason := _refusal(runner, num_ranks):
        logging.warning("speculative_method %s has no effect: %s", method, reason)
        return NO_GUESSES
    costs = _measure(runner)
    if len(costs) < 2:
        logging.warning(
            "speculative_method %s has no effect: the KV pool or the context is too small", method
        )
        return NO_GUESSES
    _log("a step", costs)
    table, draft = runner.table, runner.engine.draft
    if draft is None:
        runner.guesser = Guesser(table)
        return GuessCosts(costs, [])
    drafts = _measure(runner.with_engine(draft))
    runner.guesser = SelfDrafter(table, draft)
    _log("a draft step", drafts)
    return GuessCosts(costs, drafts)


def _log(what: str, costs: list[StepCost]) -> None:
    shown = {cost.num_tokens: round(1000 * cost.seconds, 3) for cost in costs}
    logging.debug("ms of %s by its tokens: %s", what, shown)


def _refusal(runner: "Runner", num_ranks: int) -> str:
    """Return why the runner cannot guess, or an empty string."""
    engine = runner.engine
    if not engine.supports_guesses:
        return f"the engine {engine.name} computes one token of a request in each decode step"
    if runner.table.device.type != "cpu":
        return f"tokens are guessed on a CPU only, the device is {runner.table.device}"
    return f"tokens are guessed with one process only, tp is {num_ranks}" if num_ranks > 1 else ""


def _measure(runner: "Runner") -> list[StepCost]:
    """Return the seconds of a row that decodes a token and computes guesses after it."""
    table = runner.table
    max_tokens = min(table.num_pages * table.page_size, table.context_length) - 2
    sizes = [size for size in SIZES if size <= max_tokens]
    seconds = dict.fromkeys(sizes, math.inf)
    if not sizes:
        return []
    runner.run(prefill_plan(1, table.page_size))
    num_pages = -(-(sizes[-1] + 2) // table.page_size)
    started_at, new_pages = time.perf_counter(), range(1, num_pages)
    for number in range(NUM_TRIES):
        if number >= MIN_TRIES and time.perf_counter() - started_at > MAX_MEASURING_S:
            break
        for size in sizes:
            seconds[size] = min(seconds[size], _step_s(runner, size - 1, new_pages))
            new_pages = range(0)
    runner.run(release_plan())
    return [StepCost(size, seconds[size]) for size in sizes]


def _step_s(runner: "Runner", num_guesses: int, new_pages: range) -> float:
    """Return the seconds of a decode step with guesses, after which the slot is as before.

    Args:
        runner: It has a prompt of one token in slot 0.
        num_guesses: Tokens that the row computes after its own.
        new_pages: Pages that the slot gets before.
    """
    table, plan = runner.table, decode_plan(new_pages)
    known, computed = int(table.num_known[0]), int(table.num_computed[0])
    started_at = time.perf_counter()
    if num_guesses:
        table.guess(0, [0] * num_guesses)
    runner.run(plan)
    took_s = time.perf_counter() - started_at
    table.num_known[0], table.num_computed[0] = known, computed
    return took_s
