"""A grammar on its way from the frontend to the worker."""

import hashlib

import msgspec


class GrammarForm(msgspec.Struct, array_like=True, frozen=True):
    """A grammar in the form of the library.

    Attributes:
        key: 16-byte hash that names it.
        text: the grammar.
    """

    key: bytes
    text: str

    @classmethod
    def of(cls, text: str) -> "GrammarForm":
        """Return the form of a text, with its key."""
        return cls(hashlib.blake2b(text.encode(), digest_size=16).digest(), text)
