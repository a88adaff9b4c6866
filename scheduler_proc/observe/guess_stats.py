"""Counters of guessed tokens, by vLLM's names."""

from quadriga.wire.messages.arrays import num_ids
from quadriga.wire.messages.to_client import InfoValues
from quadriga.wire.messages.worker import StepResult


class GuessStats:
    """Rows with guesses, guesses, and right guesses, since start."""

    def __init__(self, max_guesses: int) -> None:
        """Start at zero. max_guesses: largest number of guesses in a row of a step."""
        self._num_rows = 0
        self._num_guesses = 0
        self._num_right = [0] * max_guesses  # by place in the row

    def on_step(self, result: StepResult) -> None:
        """Count the guesses of a step."""
        for row in result.guessed:
            self._num_rows += 1
            self._num_guesses += row.num_guesses
            for place in range(num_ids(row.token_ids)):
                self._num_right[place] += 1

    def info(self) -> InfoValues:
        """Return all counters, as docs/protocol.md lists them."""
        return {
            "spec_decode_num_drafts_total": self._num_rows,
            "spec_decode_num_draft_tokens_total": self._num_guesses,
            "spec_decode_num_accepted_tokens_total": sum(self._num_right),
            "spec_decode_num_accepted_tokens_per_pos": {
                str(place): count for place, count in enumerate(self._num_right)
            },
        }
