"""Rules for the text of an answer, on their way from the frontend to the worker."""

import hashlib

import msgspec

# The first line of a form whose grammar begins after the reasoning: THINKING, then a ThinkingForm
# in JSON.
THINKING = "%thinking "


class ThinkingForm(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The reasoning at the beginning of an answer.

    Attributes:
        end: text that ends it. Whitespace at its ends is written by force only.
        start: text that begins it, unless the prompt has it already.
        is_inside: the prompt ends within the reasoning.
        budget: number of tokens after which `end` is written by force; None: no limit.
    """

    end: str
    start: str = ""
    is_inside: bool = True
    budget: int | None = None


class GrammarForm(msgspec.Struct, array_like=True, frozen=True):
    """A grammar in the form of the library.

    Attributes:
        key: 16-byte hash that names it.
        text: the grammar, perhaps after a line with the reasoning before it.
    """

    key: bytes
    text: str

    @classmethod
    def of(cls, text: str, thinking: ThinkingForm | None = None) -> "GrammarForm":
        """Return the form of a text, with its key.

        Args:
            text: the grammar; "" with `thinking` if what follows the reasoning is free.
            thinking: the reasoning after which the grammar begins.
        """
        if thinking is not None:
            text = f"{THINKING}{msgspec.json.encode(thinking).decode()}\n{text}"
        return cls(hashlib.blake2b(text.encode(), digest_size=16).digest(), text)

    @classmethod
    def of_request(cls, text: str | None, thinking: ThinkingForm | None) -> "GrammarForm | None":
        """Return the form for a request; None if it has neither a grammar nor a reasoning."""
        return None if text is None and thinking is None else cls.of(text or "", thinking)

    def parts(self) -> tuple[ThinkingForm | None, str]:
        """Return the reasoning, if it is limited or precedes a grammar, and the grammar.

        Raises:
            ValueError: the line with the reasoning cannot be read.
        """
        if not self.text.startswith(THINKING):
            return None, self.text
        line, _, text = self.text.partition("\n")
        return msgspec.json.decode(line.removeprefix(THINKING), type=ThinkingForm), text
