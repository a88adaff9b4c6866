"""Seconds of the steps in which the model itself, at fewer bits, drafts guesses."""

from collections.abc import Sequence

from quadriga.wire.messages.worker import StepCost
from scheduler_proc.planning.guess_costs import GuessSourceCosts, StepCosts


class DraftCosts(GuessSourceCosts):
    """What drafts cost: a round is a decode step of the rows, with weights of fewer bits."""

    prior_right = 1.5  # the draft is the same model: most of its tokens are right

    def __init__(self, costs: Sequence[StepCost]) -> None:
        """Begin with what the worker measured: seconds of draft steps by their rows."""
        self._costs = StepCosts(costs)

    def round_s(self, num_rows: int) -> float:
        """Return the seconds of a draft step; 0.0 for no rows."""
        return self._costs.seconds(num_rows) if num_rows else 0.0
