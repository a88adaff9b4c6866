"""What a request asks of the prefix cache."""

import msgspec

MAX_CACHE_TTL_S = 86400.0
MAX_CACHE_KEY_CHARS = 512


class CacheHint(msgspec.Struct, array_like=True, frozen=True):
    """Keep what a request computes in the prefix cache after its end.

    Attributes:
        key: name by which it can be released; requests of one conversation have the same one.
        ttl_s: seconds from the last use, at most MAX_CACHE_TTL_S.
        num_tokens: only so many tokens of the prompt are kept, its first ones; 0: the whole prompt
            and the answer.
        num_messages: of a chat, only the prompt up to the end of this message, counted from 1.
            The server turns it into `num_tokens`. 0: all messages.
        num_chars: characters of that message's content; None: all of it.
    """

    key: str = ""
    ttl_s: float = 300.0
    num_tokens: int = 0
    num_messages: int = 0
    num_chars: int | None = None
