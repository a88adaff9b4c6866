"""Answers that ended lately, from which those of the same group are guessed."""

from collections import OrderedDict
from collections.abc import Sequence

from worker_proc.speculation.text_index import END, TextIndex

MAX_GROUPS = 64
MAX_TOKENS = 8192  # of a group
MIN_ANSWER_TOKENS = 8  # a shorter one is no help


class RecentAnswers:
    """The last answers of some groups of requests, such as those of one tenant."""

    def __init__(self) -> None:
        self._groups: OrderedDict[bytes, TextIndex] = OrderedDict()

    def add(self, group: bytes, token_ids: Sequence[int]) -> None:
        """Keep an answer; of a group that has too many tokens, half of them are forgotten."""
        if len(token_ids) < MIN_ANSWER_TOKENS:
            return
        answers = self._groups.pop(group, None) or TextIndex()
        answers.extend([*token_ids[-MAX_TOKENS // 2 :], END])
        if len(answers.tokens) > MAX_TOKENS:
            answers = TextIndex(answers.tokens[-MAX_TOKENS // 2 :])
        self._groups[group] = answers
        if len(self._groups) > MAX_GROUPS:
            self._groups.popitem(last=False)

    def of(self, group: bytes) -> TextIndex | None:
        """Return the answers of a group; None if there are none."""
        return self._groups.get(group)
