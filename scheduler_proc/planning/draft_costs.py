"""Seconds of the steps in which the model itself, at fewer bits, drafts guesses."""

from collections.abc import Sequence

from quadriga.wire.messages.worker import StepCost
from scheduler_proc.planning.guess_costs import GuessSourceCosts, StepCosts


class DraftCosts(GuessSourceCosts):
    """What drafts cost: a round is a decode step of the rows, with weights of fewer bits."""

    # The draft is the same model: as many of its tokens are right in most of a text.
    prior_right = 1.0
    memory = 0.9
    fading = 0.99

    def numbers_of_rounds(self, most: int) -> Sequence[int]:
        """Return all numbers of rounds: each round is a step."""
        return range(1, most + 1)

    def __init__(self, costs: Sequence[StepCost]) -> None:
        """Begin with what the worker measured: seconds of draft steps by their rows."""
        self._costs = StepCosts(costs)

    def round_s(self, num_rows: int) -> float:
        """Return the seconds of a draft step; 0.0 for no rows."""
        return self._costs.seconds(num_rows) if num_rows else 0.0
