"""The limits of metadata, which clients attach to what the server keeps for them."""

from http_proc.protocol.errors import invalid

MAX_METADATA_PAIRS, MAX_METADATA_KEY_CHARS, MAX_METADATA_CHARS = 16, 64, 512


def check_metadata(metadata: dict[str, str]) -> None:
    """Raise ApiError for too many pairs, or for a long one."""
    if len(metadata) > MAX_METADATA_PAIRS:
        raise invalid(
            f"metadata has {len(metadata)} pairs: at most {MAX_METADATA_PAIRS}", "metadata"
        )
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY_CHARS or len(value) > MAX_METADATA_CHARS:
            raise invalid(
                f"metadata has {key[:100]!r} with {len(value)} characters: keys have at most"
                f" {MAX_METADATA_KEY_CHARS}, values {MAX_METADATA_CHARS}",
                "metadata",
            )
