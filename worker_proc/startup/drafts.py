"""Lets the runner draft tokens, and measures what drafts cost, for the choice of their number."""

import logging
import math
import time
from typing import TYPE_CHECKING

from quadriga.server.config.server_config import ServerConfig
from quadriga.wire.worker import DraftCost
from worker_proc.speculation.ngram import NgramDrafter
from worker_proc.speculation.self_draft import SelfDrafter
from worker_proc.step.dummy_plans import decode_plan, prefill_plan, release_plan

if TYPE_CHECKING:
    from worker_proc.step.runner import Runner

ROWS = (1, 2, 4, 8)  # of a draft step
NUM_TRIES = 5  # the fastest one counts
MIN_TRIES = 2
MAX_MEASURING_S = 0.5  # no further try begins after that


def prepare_drafts(
    runner: "Runner", config: ServerConfig, num_ranks: int
) -> list[DraftCost] | None:
    """Let the runner draft tokens, if the flags ask for it and the engine can.

    Returns:
        Seconds of draft steps, by their rows; empty: drafts take no steps of their own; None: there
        are no drafts.
    """
    method = config.scheduler.speculative_method
    if method == "none":
        return None
    if reason := _refusal(runner, method, num_ranks):
        # auto is the default, and asks for drafts where they are possible.
        level = logging.DEBUG if method == "auto" else logging.WARNING
        logging.log(level, "speculative_method %s has no effect: %s", method, reason)
        return None
    table, draft = runner.table, runner.engine.draft
    if draft is None:
        runner.drafter = NgramDrafter(table, runner.engine.max_draft_samples)
        return []
    costs = _measure_drafts(runner.with_engine(draft))
    if len(costs) < 2:
        logging.warning(
            "speculative_method %s has no effect: the KV pool or the context is too small", method
        )
        return None
    runner.drafter = SelfDrafter(table, draft)
    shown = {cost.num_rows: round(1000 * cost.seconds, 3) for cost in costs}
    logging.debug("ms of a draft step by its rows: %s", shown)
    return costs


def _refusal(runner: "Runner", method: str, num_ranks: int) -> str:
    """Return why the runner cannot draft, or an empty string."""
    engine, device = runner.engine, runner.table.device
    if not engine.supports_drafts:
        return f"the engine {engine.name} computes one token of a request in each decode step"
    if device.type != "cpu" and not engine.stores_tokens:
        return f"the engine {engine.name} drafts on a CPU only, the device is {device}"
    if device.type != "cpu" and method != "ngram":
        return (
            f"on {device} the host would wait for each token, which makes most answers slower;"
            " --speculative-method ngram drafts nevertheless"
        )
    if method == "auto" and not engine.has_equal_bits:
        return (
            f"the engine {engine.name} may round a token otherwise in a step with drafts;"
            " --speculative-method ngram drafts nevertheless"
        )
    return f"tokens are drafted with one process only, tp is {num_ranks}" if num_ranks > 1 else ""


def _measure_drafts(runner: "Runner") -> list[DraftCost]:
    """Return the seconds of draft steps: of a row with as many tokens as they have rows."""
    table = runner.table
    max_tokens = min(table.num_pages * table.page_size, table.context_length) - 2
    seconds = {size: math.inf for size in ROWS if size <= max_tokens}
    if not seconds:
        return []
    runner.run(prefill_plan(1, table.page_size))
    num_pages = -(-(max(seconds) + 2) // table.page_size)
    started_at, new_pages = time.perf_counter(), range(1, num_pages)
    for number in range(NUM_TRIES):
        if number >= MIN_TRIES and time.perf_counter() - started_at > MAX_MEASURING_S:
            break
        for size in seconds:
            seconds[size] = min(seconds[size], _step_s(runner, size - 1, new_pages))
            new_pages = range(0)
    runner.run(release_plan())
    return [DraftCost(size, of_size) for size, of_size in seconds.items()]


def _step_s(runner: "Runner", num_drafts: int, new_pages: range) -> float:
    """Return the seconds of a decode step with drafts, after which the slot is as before.

    Args:
        runner: it has a prompt of one token in slot 0.
        num_drafts: tokens that the row computes after its own.
        new_pages: pages that the slot gets before.
    """
    table, plan = runner.table, decode_plan(new_pages)
    known, computed = int(table.num_known[0]), int(table.num_computed[0])
    if num_drafts:
        table.draft({0: [0] * num_drafts})
    result = runner.run(plan)
    table.num_known[0], table.num_computed[0] = known, computed
    return result.ended - result.began
