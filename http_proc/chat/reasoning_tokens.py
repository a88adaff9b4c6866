"""Count the tokens of an answer's reasoning."""

from http_proc.answer.events import AnswerEvent, ReasoningDelta


class ReasoningTokens:
    """Count the tokens of the chunks whose text is reasoning or a mark around it.

    The count is exact if the ring sends a chunk for each token. A chunk of several tokens in which
    the reasoning ends counts as reasoning.

    Attributes:
        is_exact: no chunk of several tokens had both reasoning and other parts.
    """

    def __init__(self) -> None:
        self._num_counted = 0
        self._num_undecided = 0
        self._is_open = False
        self.is_exact = True

    @property
    def count(self) -> int:
        """Number of tokens of the reasoning so far."""
        return self._num_counted + (self._num_undecided if self._is_open else 0)

    def push(self, events: list[AnswerEvent], num_tokens: int) -> None:
        """Count the tokens of a chunk; `events` is what the parser read from its text."""
        if not events:
            # The text may be a part of a mark, or of a character.
            self._num_undecided += num_tokens
            return
        has_reasoning = any(isinstance(event, ReasoningDelta) for event in events)
        if has_reasoning or self._is_open:
            self._num_counted += self._num_undecided
        if has_reasoning:
            self._num_counted += num_tokens
            is_mixed = not all(isinstance(event, ReasoningDelta) for event in events)
            self.is_exact = self.is_exact and (num_tokens <= 1 or not is_mixed)
        self._num_undecided = 0
        self._is_open = isinstance(events[-1], ReasoningDelta)
