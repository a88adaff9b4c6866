"""Bodies of /v1/batches, and what the server keeps of a batch."""

from enum import Enum
from typing import Any, Literal

import msgspec

from http_proc.protocol.schema import RequestBody
from quadriga.clock import now


class BatchStatus(str, Enum):
    """The state of a batch, in OpenAI's words."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_open(self) -> bool:
        """Whether the batch has not ended."""
        return self in (
            BatchStatus.VALIDATING,
            BatchStatus.IN_PROGRESS,
            BatchStatus.FINALIZING,
            BatchStatus.CANCELLING,
        )


class CreateBatchRequest(RequestBody):
    """POST /v1/batches. metadata: at most 16 texts by name, returned with the batch."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None


class LineError(msgspec.Struct):
    """Why the input file is refused. line: number of the line, from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class LineErrors(msgspec.Struct):
    """The first errors of an input file."""

    data: list[LineError]
    object: str = "list"


class RequestCounts(msgspec.Struct):
    """Numbers of lines: of the file, answered with 200, and answered otherwise."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch. Times are in Unix seconds."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: BatchStatus = BatchStatus.VALIDATING
    object: str = "batch"
    model: str | None = None
    errors: LineErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None

    def enter(self, status: BatchStatus) -> None:
        """Set the state and its time."""
        self.status = status
        setattr(self, f"{status.value}_at", int(now()))


class StoredBatch(msgspec.Struct, kw_only=True):
    """What is kept of a batch: itself, and the ids that its output files have from the start.

    Attributes:
        owner: name of the tenant by whose key it was made; "" for none.
        caller: name of the tenant that its lines run as, with its user; "" for none.
        has_users: its lines may name users.
    """

    batch: BatchObject
    answers_id: str
    failures_id: str
    owner: str = ""
    caller: str = ""
    has_users: bool = False


class BatchList(msgspec.Struct):
    """A page of batches, the newest first."""

    data: list[BatchObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class OutputLine(msgspec.Struct):
    """A line of an output file or of an error file."""

    id: str
    custom_id: str
    response: dict[str, Any] | None
    error: LineError | None
