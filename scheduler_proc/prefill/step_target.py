"""--itl-target: how many prompt tokens a step may compute so that it is expected to be in time.

A running stream gets a token with each step, so that a step's time is its inter-token latency
(ITL). A newcomer waits for the step that runs, too. So the target bounds all steps with prompts, as
far as the cost model (step_cost.py) can tell; the first step with prompts has no bound.
"""

from typing import Protocol

from quadriga.config.scheduler_args import SchedulerArgs
from scheduler_proc.planning.step_cost import StepCostModel

# Aimed at, of the target: measured steps lie around the expected ones.
AIM = 0.9
# A step computes so many prompt tokens even if its decode rows alone take longer than the target.
MIN_PROMPT_TOKENS = 16


class StepLoad(Protocol):
    """What a step computes, as ScheduleBatch has it."""

    @property
    def num_decodes(self) -> int:
        """Number of decode rows."""

    @property
    def num_prompts(self) -> int:
        """Number of prompts."""

    @property
    def num_prompt_tokens(self) -> int:
        """Number of their tokens."""

    @property
    def num_pairs(self) -> int:
        """Pairs of a prompt token and a token that it attends to."""


class StepTarget:
    """Bound the prompt tokens of a step by the time that it is expected to take.

    Args:
        args: the scheduler's flags.
        costs: what steps take.
    """

    def __init__(self, args: SchedulerArgs, costs: StepCostModel) -> None:
        self._costs = costs
        self._seconds = None if args.itl_target is None else AIM * args.itl_target / 1000

    def limit(self, limit: int, context: int, batch: StepLoad, num_streams: int) -> int:
        """Return how many further tokens of a prompt the step can take, at most `limit`.

        Args:
            limit: number of tokens that it could take without a target.
            context: number of the prompt's tokens before them.
            batch: the step as it is.
            num_streams: number of requests that decode in this step, or in the one after it.
        """
        if self._seconds is None or not self._costs.knows_prompts:
            return limit
        spent = self._costs.seconds(num_streams, batch.num_prompt_tokens, batch.num_pairs)
        if num_streams and not batch.num_decodes:  # streams get their tokens in the step after it
            spent += self._costs.seconds(0)
        most = self._costs.tokens_within(self._seconds - spent, context)
        if batch.num_prompts == 0:
            most = max(most, MIN_PROMPT_TOKENS)
        return min(limit, most)
