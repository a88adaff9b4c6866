"""The exceptions of the client library and the server: one for each remedy a user has.

    QuadrigaError
        InvalidRequest          the request must change
            PromptTooLong
        QueueFull               try again later
            QuotaExceeded
        RequestAborted  DeadlineExceeded  SlowReader
        RequestFailed
            NonFiniteLogits
        ServerStopping  ServerFailed  ServerUnreachable
        ConfigError  ModelError  AddressInUse

On the wire an error is an `ErrorInfo`; `from_code` returns its exception.
"""

MAX_SHOWN_CHARS = 60  # of a value in a message


class QuadrigaError(Exception):
    """Base class. `code` is the name on the wire."""

    code = "error"


class InvalidRequest(QuadrigaError):
    """The request cannot be served as it is; the message names value, limit and remedy.

    Attributes:
        field: the field that is wrong, or "".
    """

    code = "invalid_request"

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field

    def of_text(self, place: str) -> "InvalidRequest":
        """Return the same error with the place of a text among several, where one is at fault."""
        if self.field not in ("prompt", "prompt_token_ids", "text_pair"):
            return self
        message = str(self)
        if message.startswith(f"{self.field} "):
            return type(self)(f"{place}{message[len(self.field) :]}", self.field)
        return type(self)(f"{place}: {message}", self.field)


class PromptTooLong(InvalidRequest):
    """Prompt and max_new_tokens together exceed the model's context, or the whole KV pool."""

    code = "prompt_too_long"


class QueueFull(QuadrigaError):
    """The server accepts no further request now.

    Attributes:
        retry_after: seconds after which a retry may succeed, if the server knows.
        queue_position: place that the request would have had in the full waiting queue; None where
            another limit is reached.
        expected_wait: estimated seconds that it would have waited there, if the server knows.
    """

    code = "queue_full"

    def __init__(
        self,
        message: str,
        retry_after: float | None = None,
        queue_position: int | None = None,
        expected_wait: float | None = None,
    ) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.queue_position = queue_position
        self.expected_wait = expected_wait

    @classmethod
    def of_waiting(
        cls,
        num_waiting: int,
        limit: int,
        retry_after: float,
        queue_position: int | None = None,
        expected_wait: float | None = None,
    ) -> "QueueFull":
        """Return the error of a waiting queue that has --max-queued-requests requests."""
        return cls(
            f"{num_waiting} requests are waiting and --max-queued-requests is {limit}; try again in"
            f" {retry_after:g} s",
            retry_after,
            queue_position,
            expected_wait,
        )

    @classmethod
    def of_client(cls, num_open: int, limit: int, retry_after: float) -> "QueueFull":
        """Return the error of a client that has --max-requests-per-client open requests."""
        return cls(
            f"this client has {num_open} open requests and --max-requests-per-client is {limit};"
            f" wait until one has ended, or try again in {retry_after:g} s",
            retry_after,
        )


class QuotaExceeded(QueueFull):
    """A tenant has used what its entry of --keys allows it; the server itself has room."""

    code = "quota_exceeded"


class RequestAborted(QuadrigaError):
    """The request was aborted before it finished."""

    code = "aborted"


class RequestFailed(QuadrigaError):
    """The server could not continue the request; the message says why."""

    code = "failed"


class NonFiniteLogits(RequestFailed):
    """The model's numbers overflow for this request: no token can be chosen."""

    code = "non_finite_logits"

    @classmethod
    def at(cls, position: int) -> "NonFiniteLogits":
        """Return the error of a request. position: of the token that could not be chosen."""
        return cls(
            f"the model's logits for token {position} of the request are NaN or infinite, or none"
            " of them is finite: its numbers overflow for this text. The same request would end"
            " alike: change its text; if it happens to many, start the server with --dtype float32,"
            " and check the checkpoint (`quadriga models check`)"
        )


class NonFiniteVector(RequestFailed):
    """The model's numbers overflow for this text: its vector has NaN or infinity."""

    code = "non_finite_vector"

    @classmethod
    def of_prompt(cls) -> "NonFiniteVector":
        """Return the error of a request."""
        return cls(
            "the vector of this text has NaN or infinity: the model's numbers overflow for it. The"
            " same request would end alike: change its text; if it happens to many, start the"
            " server with --dtype float32, and check the checkpoint (`quadriga models check`)"
        )


class ServerStopping(QuadrigaError):
    """The server is draining and accepts no new requests."""

    code = "server_stopping"


class ServerFailed(QuadrigaError):
    """A process of the server died; the message names it."""

    code = "server_failed"


class ServerUnreachable(QuadrigaError):
    """No server answers at the endpoint, or the connection was lost."""

    code = "server_unreachable"


class DeadlineExceeded(QuadrigaError):
    """A deadline of the caller or of the server passed; the request was aborted."""

    code = "deadline_exceeded"


class SlowReader(QuadrigaError):
    """The client did not read its results and was disconnected."""

    code = "slow_reader"


class ConfigError(QuadrigaError):
    """A flag or a combination of flags that cannot work."""

    code = "config"


class ModelError(QuadrigaError):
    """The model cannot be found, fetched, read or run."""

    code = "model"


class AddressInUse(QuadrigaError):
    """Another process uses the address of the endpoint."""

    code = "address_in_use"


def quoted(value: object) -> str:
    """Return a value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…"


def _all_subclasses(cls: type[QuadrigaError]) -> list[type[QuadrigaError]]:
    below = [error for child in cls.__subclasses__() for error in _all_subclasses(child)]
    return [cls, *below]


def from_code(
    code: str, message: str, field: str = "", retry_after: float | None = None
) -> QuadrigaError:
    """Return the exception for an error that was received."""
    for cls in _all_subclasses(QuadrigaError):
        if cls.code == code:
            if issubclass(cls, InvalidRequest):
                return cls(message, field)
            return cls(message, retry_after) if issubclass(cls, QueueFull) else cls(message)
    return QuadrigaError(f"{code}: {message}")
