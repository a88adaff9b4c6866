"""The spans of one traced request: phases that follow each other without gaps.

A phase ends where the next one begins, so that the phases of a request add up to its time. What
the worker computes of a phase is a span within it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quadriga.wire.trace import (
    REPLICA,
    Attributes,
    AttributeValue,
    Span,
    SpanEvent,
    TraceContext,
)

TOKENIZE, QUEUE, PREFILL, DECODE = "tokenize", "queue", "prefill", "decode"
WORKER_RESTART, SCHEDULER_RESTART = "worker restart", "scheduler restart"
OTHER_REPLICA = "other replica"
LOAD = "load KV pages"
FORWARD = "forward"

# Bounds of one request: further phases are merged into the last one, further events left out.
MAX_SPANS = 512
MAX_EVENTS = 512


class PromptTotals(NamedTuple):
    """What all requests' prompts have taken up to a step.

    Attributes:
        num_parts: rows that computed a prompt, or a part of one.
        num_tokens: prompt tokens in them.
        seconds: of the worker, for the steps that had such rows.
    """

    num_parts: int = 0
    num_tokens: int = 0
    seconds: float = 0.0


NO_PROMPTS = PromptTotals()


@dataclass(slots=True)
class DecodeSteps:
    """The steps of a decode phase. Seconds, and Unix seconds in `_at`.

    Attributes:
        max_rows: rows of the largest of them.
        before, after: the prompts up to the begin of the phase, and up to its last step.
    """

    before: PromptTotals = NO_PROMPTS
    after: PromptTotals = NO_PROMPTS
    max_rows: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    compute_s: float = 0.0
    longest_gap_s: float = 0.0
    longest_gap_at: float = 0.0

    def attributes(self) -> Attributes:
        """Return what a span shows of them."""
        attributes: Attributes = {
            "steps": self.num_steps,
            "tokens": self.num_tokens,
            "max_rows": self.max_rows,
            "compute_ms": round(1000 * self.compute_s, 3),
            "longest_gap_ms": round(1000 * self.longest_gap_s, 3),
            "longest_gap_at": self.longest_gap_at,
        }
        if num_parts := self.after.num_parts - self.before.num_parts:
            attributes["prompt_parts"] = num_parts
            attributes["prompt_tokens"] = self.after.num_tokens - self.before.num_tokens
            seconds = self.after.seconds - self.before.seconds
            attributes["prompt_steps_ms"] = round(1000 * seconds, 3)
        return attributes


@dataclass(slots=True)
class OpenPhase:
    """A phase that has not ended. Times are Unix seconds."""

    name: str
    began_at: float
    attributes: Attributes = field(default_factory=dict)
    events: list[SpanEvent] = field(default_factory=list)
    computed: tuple[float, float] | None = None


def replica_of(span: Span) -> Attributes:
    """Return the attribute that says at which replica a span was; empty where it is not known."""
    return {name: span.attributes[name] for name in (REPLICA,) if name in span.attributes}


class SpanRecorder:
    """Record the phases of one choice of a request, from its Submit to its end.

    Attributes:
        context: place of the request in its trace.
        phase: the current phase; None after the end.
        spans: the phases that have ended, with the worker's spans in them.
    """

    __slots__ = (
        "_last_step_at", "_num_events", "_steps", "attributes", "context", "phase", "spans",
    )  # fmt: skip

    def __init__(self, context: TraceContext, received_at: float, tokenized_at: float) -> None:
        self.context = context
        self.spans = [Span(TOKENIZE, "tokenizer_proc", received_at, tokenized_at)]
        self.phase: OpenPhase | None = OpenPhase(QUEUE, tokenized_at)
        self.attributes: Attributes = {}
        self._steps = DecodeSteps()
        self._last_step_at = tokenized_at
        self._num_events = 0

    def event(self, name: str, at: float, **attributes: AttributeValue) -> None:
        """Note something that happened in the current phase."""
        if self.phase is not None and self._num_events < MAX_EVENTS:
            self._num_events += 1
            self.phase.events.append(SpanEvent(name, at, attributes))

    def enter(self, name: str, at: float, **attributes: AttributeValue) -> None:
        """End the current phase, and begin another one."""
        phase = self.phase
        if phase is None:
            return
        if len(self.spans) >= MAX_SPANS:
            num_merged = phase.attributes.get("merged_phases", 0)
            phase.attributes["merged_phases"] = int(num_merged) + 1
            return
        self._close(phase, at)
        # Times of two processes may be a little out of order; phases never are.
        self.phase = OpenPhase(name, max(at, phase.began_at), attributes)

    def finish(self, at: float) -> None:
        """End the last phase."""
        if self.phase is not None:
            self._close(self.phase, at)
            self.phase = None

    def _close(self, phase: OpenPhase, at: float) -> None:
        if phase.name == DECODE and self._steps.num_steps:
            phase.attributes |= self._steps.attributes()
        ended_at = max(at, phase.began_at)
        if ended_at == phase.began_at and not (phase.events or phase.attributes):
            return
        place = len(self.spans)
        self.spans.append(
            Span(
                phase.name, "scheduler_proc", phase.began_at, ended_at, phase.attributes,
                phase.events,
            )
        )  # fmt: skip
        if phase.computed is not None:
            self.spans.append(Span(FORWARD, "worker_proc", *phase.computed, parent=place))

    # --- steps of the worker ----------------------------------------------------------------------

    def on_chunk(
        self,
        began_at: float,
        ended_at: float,
        samples: bool,
        prompts: PromptTotals,
        **attributes: AttributeValue,
    ) -> None:
        """End the phase of a chunk that a step has computed.

        Args:
            began_at: when the worker began the step, Unix seconds.
            ended_at: when it had the result.
            samples: it was the last chunk.
            prompts: all requests' prompts up to this step.
            attributes: of the phase.
        """
        if self.phase is None:
            return
        self.phase.computed = began_at, ended_at
        self.phase.attributes |= attributes
        self._last_step_at = ended_at
        self._steps = DecodeSteps(prompts)
        self.enter(DECODE if samples else PREFILL, ended_at)

    def on_decode(
        self,
        began_at: float,
        ended_at: float,
        num_tokens: int,
        num_rows: int,
        prompts: PromptTotals,
    ) -> None:
        """Count a decode step with `num_rows` rows. The others as for `on_chunk`."""
        steps = self._steps
        gap_s = ended_at - self._last_step_at
        steps.num_steps += 1
        steps.num_tokens += num_tokens
        steps.compute_s += ended_at - began_at
        steps.after = prompts
        if num_rows > steps.max_rows:
            steps.max_rows = num_rows
        if gap_s > steps.longest_gap_s:
            steps.longest_gap_s, steps.longest_gap_at = gap_s, ended_at
        self._last_step_at = ended_at

    # --- restarts ---------------------------------------------------------------------------------

    def on_worker_restart(self, now: float) -> None:
        """Begin again in the queue. What the steps in flight had computed is lost."""
        phase = self.phase
        if phase is None:
            return
        if phase.name == DECODE and self._last_step_at > phase.began_at:
            self.enter(WORKER_RESTART, self._last_step_at)
        elif phase.name != QUEUE:
            phase.name = WORKER_RESTART
        self.enter(QUEUE, now, after=WORKER_RESTART)

    def go_on(self, spans: Sequence[Span]) -> None:
        """Begin with the spans of the replica that has computed the prompt, up to its last chunk.

        It has generated tokens since then.
        """
        self.spans = list(spans)
        ended_at = max(span.ended_at for span in spans if span.parent < 0)
        self.phase = OpenPhase(DECODE, ended_at, dict(replica_of(spans[-1])))

    def on_move(self, now: float) -> None:
        """Begin again in the queue, after a time at another replica, whose spans may be known."""
        if self.phase is not None and self.phase.name == QUEUE:
            self.phase.name = OTHER_REPLICA
        self.enter(QUEUE, now, after=OTHER_REPLICA)

    def on_scheduler_restart(self, first_token_at: float, last_token_at: float, now: float) -> None:
        """Begin again in the queue, with the tokens that the journal has. 0.0: it has none."""
        if first_token_at and self.phase is not None:
            self.phase.name = "queue and prefill"
            self.enter(DECODE, first_token_at)
            self.enter(SCHEDULER_RESTART, last_token_at)
        elif self.phase is not None:
            self.phase.name = SCHEDULER_RESTART
        self.enter(QUEUE, now, after=SCHEDULER_RESTART)
