"""A grammar on its way from the front door to the worker."""

import hashlib

import msgspec


class GrammarForm(msgspec.Struct, array_like=True, frozen=True):
    """text: in the form of the library. key: 16 bytes that name it."""

    key: bytes
    text: str

    @classmethod
    def of(cls, text: str) -> "GrammarForm":
        return cls(hashlib.blake2b(text.encode(), digest_size=16).digest(), text)
