"""Run the steps that the scheduler plans.

The runner has an engine, the slots that it computes for, and a `Drafter`, whose contract is
here, if tokens are drafted.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from quadriga.errors import ServerFailed
from quadriga.sampling.pooling import MEAN, Pooling
from quadriga.wire.worker import FailedRow, StepPlan, StepResult
from worker_proc.adapters.places import Places
from worker_proc.step.clock import RunningStep, step_clock
from worker_proc.step.dummy_plans import decode_plan, prefill_plan, release_plan
from worker_proc.step.engine import Engine
from worker_proc.step.outputs import EngineOutput, PendingStep
from worker_proc.step.slot_table import SlotTable, ints_of


class Drafter(ABC):
    """Drafts tokens for the slots of a table. The runner calls it at each plan of the scheduler.

    A draft is only ever compared with the token that is sampled in its place, so that a wrong one
    costs time and changes no answer.
    """

    @abstractmethod
    def begin(self, plan: StepPlan) -> None:
        """Note what a plan changes, before the table applies it and forgets what it releases."""

    @abstractmethod
    def draft(self, plan: StepPlan) -> None:
        """Write drafts into the table for the rows of a plan, which is applied.

        At most as many for each row as the plan and `SlotTable.room_for_drafts` allow.
        """


NO_ROWS = PendingStep(lambda: EngineOutput(b""))


def _out_of_memory(error: torch.OutOfMemoryError) -> ServerFailed:
    return ServerFailed(
        "the GPU's memory does not suffice for a step: start with a lower --mem-fraction-static,"
        f" or smaller steps (--prefill-max-tokens, --max-running-requests); torch says: {error}"
    )


class Runner:
    """An engine and the slots that it computes for. One `run` or `launch` at a time.

    Attributes:
        dtype: of the weights.
        window: tokens that every layer's attention is limited to; 0 if a layer sees all that a
            slot can hold.
        quantization: how the weights are kept: --quantization, with `auto` resolved.
        only_pooling: of a model without a head, whose answers are vectors; None: it has tokens.
        places: where adapters belong in the model; None: it takes none.
        drafter: drafts tokens where plans ask for it; None: there are no drafts.
    """

    def __init__(
        self,
        engine: Engine,
        table: SlotTable,
        dtype: torch.dtype,
        window: int = 0,
        quantization: str = "none",
    ) -> None:
        self.engine = engine
        self.table = table
        self.dtype = dtype
        self.window = window if window < table.context_length else 0
        self.quantization = quantization
        self.only_pooling = None if engine.has_head else Pooling(MEAN, whole=True)
        self.places: Places | None = None
        self.drafter: Drafter | None = None
        self._start_clock = step_clock(table.device)

    def with_engine(self, engine: Engine) -> "Runner":
        """Return a runner of the same slots whose steps another engine computes."""
        return Runner(engine, self.table, self.dtype, self.window, self.quantization)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises ValueError if the plan contradicts the slots."""
        return self.launch(plan)()

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Launch one step, in torch's inference mode, which takes too long to enter at every step.

        On a GPU the next step may be launched before this one has ended.

        Returns:
            A function that waits for the end of the step, in any thread.

        Raises:
            ValueError: the plan contradicts the slots.
            ServerFailed: the memory of a GPU does not suffice for the step.
        """
        clock = self._start_clock()
        self._apply(plan)
        refused = self._refused_rows(plan)
        pending = self._execute(plan, clock) if plan.slots else NO_ROWS
        times = clock.stop()

        def finish() -> StepResult:
            output = pending.wait()
            began, ended = times()
            return StepResult(
                step=plan.step,
                token_ids=output.token_ids,
                began=began,
                ended=ended,
                logprobs=output.logprobs,
                prompt_logprobs=output.prompt_logprobs,
                failed=refused + output.failed,  # the first reason counts
                session=plan.session,
                forced=output.forced,
                guessed=output.drafted,
                nonfinite=output.nonfinite,
                vectors=output.vectors,
            )

        if pending.blocks_next:
            result = finish()
            return lambda: result
        return finish

    def _execute(self, plan: StepPlan, clock: RunningStep) -> PendingStep:
        """Compute the rows of a plan, a second time if the memory of a GPU ran out.

        The first time has then freed what it allocated, of which new and whole blocks are made.
        """
        try:
            return self.engine.execute(plan, self.table, clock)
        except torch.OutOfMemoryError as error:
            if self.engine.ranks is not None:  # the others would wait for this one
                raise _out_of_memory(error) from error
        torch.cuda.empty_cache()
        logging.warning("the GPU's memory ran out in a step, which is computed again")
        try:
            return self.engine.execute(plan, self.table, clock)
        except torch.OutOfMemoryError as error:
            raise _out_of_memory(error) from error

    def _apply(self, plan: StepPlan) -> None:
        """Apply a plan to the slots, and draft the next tokens of its rows."""
        drafter = self.drafter
        if drafter is None:
            self.table.apply(plan)
            return
        drafter.begin(plan)
        self.table.apply(plan)
        drafter.draft(plan)

    def _refused_rows(self, plan: StepPlan) -> list[FailedRow]:
        """Return the rows of requests that the slot table has refused."""
        refused = self.table.refused
        if not refused:
            return []
        slots = ints_of(plan.slots).tolist()
        return [FailedRow(row, refused[slot]) for row, slot in enumerate(slots) if slot in refused]

    def warm_up(self) -> None:
        """Run a short prefill and, if there is room, a decode step, and leave nothing behind."""
        table = self.table
        num_tokens = min(table.page_size, max(table.context_length - 1, 1), 8)
        self.run(prefill_plan(num_tokens, table.page_size, pooling=self.only_pooling))
        if self.only_pooling is None and num_tokens < min(
            table.num_pages * table.page_size, table.context_length
        ):
            self.run(decode_plan([1] if num_tokens == table.page_size else ()))
        self.run(release_plan())
        self.engine.capture_graphs(table)
