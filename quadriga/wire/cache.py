"""What a request asks of the prefix cache."""

import msgspec

MAX_CACHE_TTL_S = 86400.0
MAX_CACHE_KEY_CHARS = 512


class CacheHint(msgspec.Struct, array_like=True, frozen=True):
    """Keep what a request computes in the prefix cache after its end.

    Attributes:
        key: name by which it can be released; requests of one conversation have the same one.
        ttl_s: seconds from the last use, at most MAX_CACHE_TTL_S.
    """

    key: str = ""
    ttl_s: float = 300.0
