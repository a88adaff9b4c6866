"""The turns of a chat."""

import json
from dataclasses import dataclass, field
from pathlib import Path

Turn = dict[str, str]


@dataclass
class Conversation:
    """A system prompt and the questions and answers so far.

    Attributes:
        system: the system prompt; "": none.
        turns: questions and answers in turns, as the API's messages.
    """

    system: str = ""
    turns: list[Turn] = field(default_factory=list)

    def messages(self, question: str | None = None) -> list[Turn]:
        """Return the messages of the chat, with a further question if one is given."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        asked = [] if question is None else [{"role": "user", "content": question}]
        return [*system, *self.turns, *asked]

    def add(self, question: str, answer: str) -> None:
        """Append a question and its answer."""
        self.turns += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]

    def remove_last(self) -> str | None:
        """Remove the last question and its answer; return the question, None if there is none."""
        if not self.turns:
            return None
        question = self.turns[-2]["content"]
        del self.turns[-2:]
        return question

    def save(self, path: Path) -> None:
        """Write the messages as JSON. Raise OSError if the file cannot be written."""
        text = json.dumps(self.messages(), ensure_ascii=False, indent=2)
        path.write_text(text + "\n", encoding="utf-8")
