"""The contract of what guesses tokens."""

from abc import ABC, abstractmethod

from quadriga.wire.messages.worker import StepPlan


class GuessSource(ABC):
    """Guesses tokens for the slots of a table. The runner calls it at each plan of the scheduler.

    A guess is only ever compared with the token that is sampled in its place, so that a wrong one
    costs time and changes no answer.
    """

    @abstractmethod
    def begin(self, plan: StepPlan) -> None:
        """Note what a plan changes, before the table applies it and forgets what it releases."""

    @abstractmethod
    def guess(self, plan: StepPlan) -> None:
        """Write guesses into the table for the rows of a plan, which is applied.

        At most as many for each row as the plan and `SlotTable.room_for_guesses` allow.
        """
