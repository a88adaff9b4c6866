"""A log of the frames that a scheduler sends, as a hash and as lines of text.

The log holds encoded bytes, so that it depends on what is on the wire and on no name in the code.
"""

import hashlib
import json
from collections.abc import Callable
from typing import Any

import msgspec

from quadriga.wire.messages.arrays import unpack_ids
from quadriga.wire.sockets import encode

TO_WORKER, TO_DETOK = "worker", "detok"
# A plan's frame is an array of at most 15 fields, of which the tag is the first.
PLAN_TAG, PLAN_TAG_AT = b"\xa4plan", slice(1, 6)


class FrameLog:
    """Hash frames in the order in which they are sent.

    Attributes:
        num_frames: frames up to now.
        num_plans: step plans among them.
    """

    def __init__(self, write_line: Callable[[str], object] | None = None) -> None:
        """Start an empty log.

        Args:
            write_line: called with a line of text for each frame.
        """
        self.num_frames = 0
        self.num_plans = 0
        self._hash = hashlib.sha256()
        self._write_line = write_line

    def add(self, link: str, frame: bytes, at_us: int = 0) -> None:
        """Add one encoded frame.

        Args:
            link: TO_WORKER or TO_DETOK.
            frame: the bytes as a socket would send them.
            at_us: when it is sent; a plan that is sent too late or too early is another decision.
        """
        start = f"{at_us} {link} {len(frame)} "
        self._hash.update(start.encode() + frame)
        self.num_frames += 1
        self.num_plans += link == TO_WORKER and frame[PLAN_TAG_AT] == PLAN_TAG
        if self._write_line is not None:
            message = msgspec.msgpack.decode(frame)
            self._write_line(f"{self.num_frames} {at_us} us {link} {json.dumps(as_json(message))}")

    def observe(self, link: str, message: msgspec.Struct) -> None:
        """Add one message that is not encoded yet."""
        self.add(link, encode(message))

    @property
    def summary(self) -> dict[str, Any]:
        """Return what is committed of a log: its hash, and its number of plans and frames."""
        return {
            "sha256": self._hash.hexdigest(),
            "plans": self.num_plans,
            "frames": self.num_frames,
        }


def as_json(value: Any) -> Any:
    """Return a decoded msgpack value in a form that JSON has and that a reader understands.

    Bytes become text where they are printable, else a list of int32 where their length allows it,
    else hex digits.
    """
    if isinstance(value, bytes):
        if value.isascii() and value.decode("ascii").isprintable():
            return value.decode("ascii")
        return value.hex() if len(value) % 4 else unpack_ids(value).tolist()
    if isinstance(value, dict):
        return {str(key): as_json(element) for key, element in value.items()}
    if isinstance(value, list):
        return [as_json(element) for element in value]
    return value
