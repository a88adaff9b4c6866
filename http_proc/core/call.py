"""Call: what a client asks of one of the APIs, wherever it comes from."""

from dataclasses import dataclass, field
from typing import Any

from http_proc.core.body import parse_object
from http_proc.core.observe import CallRecord
from http_proc.core.resumption import Resumption


@dataclass(slots=True)
class Call:
    """A call of an API: of a web request, of a line of a batch, or of a resumable stream.

    Attributes:
        path: of the API's endpoint.
        body: the JSON as it came; empty once it was parsed.
        request_id: the X-Request-Id, of which the id of the answer is made.
        is_named: the client has chosen that id.
        priority: the priority in place of the body's; None: the body's.
        may_keep: the answer may be stored, and be made in the background.
        resumption: makes the answer the same again; None: the call is not resumable.
        record: what is logged of it.
    """

    path: str
    body: bytes
    request_id: str
    is_named: bool = False
    priority: int | None = None
    may_keep: bool = True
    resumption: Resumption | None = None
    record: CallRecord = field(default_factory=CallRecord)

    async def parse(self) -> dict[str, Any]:
        """Return the JSON object in the body, whose bytes are kept no longer.

        Raises:
            ApiError: as `parse_object`.
        """
        data, self.body = self.body, b""
        fields = await parse_object(data)
        if self.priority is not None:
            fields["priority"] = self.priority
        return fields
