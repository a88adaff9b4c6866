"""Time stamps and counts of one request, in Unix seconds on one clock."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestRecord:
    """Time stamps and counts of one request; a time of 0.0 was never reached.

    Attributes:
        submit_start: 0.0: the request was not sent, as the request that it continues failed.
        due: Time at which it should have been sent; None: the schedule has no time for it.
        received: Stamped by the server, as are tokenized, admitted and first_token.
        finished: Arrival of the end marker.
        token_times: End of the step that sampled each token, stamped by the server.
        arrivals: Arrival of each token; the tokens of one chunk arrive together.
        chunks: Arrival of each chunk that has a token.
    """

    index: int
    submit_start: float = 0.0
    submit_end: float = 0.0
    due: float | None = None
    client: int = 0
    received: float = 0.0
    tokenized: float = 0.0
    admitted: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    token_times: list[float] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    chunks: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str = ""
    error: str | None = None

    @property
    def first_received(self) -> float:
        """Arrival of the first token, or 0.0."""
        return self.arrivals[0] if self.arrivals else 0.0

    @property
    def time_per_token(self) -> float | None:
        """(Last - first) / (n - 1) in seconds; None if all tokens came in one chunk."""
        tokens = max(len(self.arrivals), self.completion_tokens)
        if len(self.arrivals) < 2:
            return None
        return max(0.0, self.arrivals[-1] - self.arrivals[0]) / (tokens - 1)
