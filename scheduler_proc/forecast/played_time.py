"""The time of a future that is played, and the requests that decode in it until they end."""

import heapq
from typing import NamedTuple, Protocol

from scheduler_proc.core import SchedulerCore
from scheduler_proc.forecast.played import PlayedStep
from scheduler_proc.state.plan import BatchMode


class RunningEnd(NamedTuple):
    """An end in the future: after how many decode steps, and the tokens of KV that it frees."""

    step: float
    num_tokens: float


class StepSeconds(Protocol):
    """How long steps take, as StepCostModel has it."""

    def seconds(self, num_decodes: int, num_tokens: int = 0, num_pairs: int = 0) -> float:
        """Return the seconds of a step."""


class PlayedTime:
    """The seconds and decode steps that were played, and the ends of the running requests.

    Args:
        core: its mode, and its number of decode rows.
        costs: how long steps take.

    Attributes:
        seconds: that were played.
    """

    def __init__(self, core: SchedulerCore, costs: StepSeconds) -> None:
        self._core = core
        self._costs = costs
        self.seconds = 0.0
        self._step = 0.0  # decode steps
        self._ends: list[RunningEnd] = []  # a heap

    @property
    def is_known(self) -> bool:
        """Whether a step was measured."""
        return bool(self._costs.seconds(1))

    @property
    def num_running(self) -> int:
        """Number of requests that decode."""
        return len(self._ends)

    @property
    def num_decodes(self) -> int:
        """Number of decode rows of a step."""
        return min(self._core.running.width, len(self._ends))

    @property
    def steps_until_end(self) -> float:
        """Decode steps until the first running request ends; there is one."""
        return self._ends[0].step - self._step

    def add_running(self, num_decode_steps: float, num_tokens: float) -> None:
        """Let a request decode from now on.

        Args:
            num_decode_steps: until its end, if it has a row in each.
            num_tokens: of KV, which it frees then.
        """
        # Decode steps in which each running request gets a token, where they take turns.
        turns = max(1.0, (len(self._ends) + 1) / self._core.running.width)
        heapq.heappush(self._ends, RunningEnd(self._step + num_decode_steps * turns, num_tokens))

    def begin_in_step(self, has_partial: bool) -> None:
        """Let the rest of the step pass that runs now: half of it, on average."""
        if self._ends or has_partial:
            num_tokens = self._core.prefill.budget.tokens if has_partial else 0
            self.seconds += self._costs.seconds(self.num_decodes, num_tokens) / 2

    def pass_prompts(self, step: PlayedStep, num_alike: int, has_partial: bool) -> None:
        """Let the time of steps with prompts pass.

        Args:
            step: all of their prompt tokens.
            num_alike: number of the steps, which are alike.
            has_partial: whether prompts are partly computed after them.
        """
        mode = self._core.mode
        # Whether running requests get a token with a step of prompts, or right after it.
        decodes_follow = mode in (BatchMode.MIXED, BatchMode.ALTERNATE) or has_partial
        num_tokens, num_pairs = step.num_prompt_tokens // num_alike, step.num_pairs // num_alike
        if mode is BatchMode.MIXED:
            step_s = self._costs.seconds(step.num_decodes, num_tokens, num_pairs)
        else:
            step_s = self._costs.seconds(0, num_tokens, num_pairs)
            if decodes_follow and step.num_decodes:
                step_s += self._costs.seconds(step.num_decodes)
        self.seconds += num_alike * step_s
        self._step += num_alike * decodes_follow

    def pass_decodes(self) -> None:
        """Let decode steps pass until a running request ends; there is one."""
        self.seconds += self.steps_until_end * self._costs.seconds(self.num_decodes)
        self._step = self._ends[0].step

    def end_due(self) -> list[RunningEnd]:
        """Remove the requests that have all of their tokens, and return their ends."""
        ended = []
        while self._ends and self._ends[0].step <= self._step:
            ended.append(heapq.heappop(self._ends))
        return ended
