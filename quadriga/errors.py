"""One exception for each thing that a user can do something about.

On the wire an error is an `ErrorInfo`; `from_code` turns it back into the class.
"""


class QuadrigaError(Exception):
    """Base of everything this project raises on purpose. `code` is its name on the wire."""

    code = "error"


class InvalidRequest(QuadrigaError):
    """A request that can never be served as it stands: names field, value, limit and remedy."""

    code = "invalid_request"

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class PromptTooLong(InvalidRequest):
    """Prompt and max_new_tokens together exceed the model's context, or the whole KV pool."""

    code = "prompt_too_long"


class QueueFull(QuadrigaError):
    """The server takes no further request now: try again later.

    retry_after: seconds after which that may pay, where the server knows.
    """

    code = "queue_full"

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestAborted(QuadrigaError):
    """The request was ended from outside before it finished."""

    code = "aborted"


class RequestFailed(QuadrigaError):
    """The server could not go on with this request; the message says why."""

    code = "failed"


class ServerStopping(QuadrigaError):
    """The server is draining and takes no new requests."""

    code = "server_stopping"


class ServerFailed(QuadrigaError):
    """A process of the server died; the message names it."""

    code = "server_failed"


class ServerUnreachable(QuadrigaError):
    """Nobody answers at the endpoint, or the connection was lost."""

    code = "server_unreachable"


class DeadlineExceeded(QuadrigaError):
    """A deadline of the caller or of the server passed; the request was aborted."""

    code = "deadline_exceeded"


class SlowReader(QuadrigaError):
    """The client did not read its results; the server cut it off at a bound."""

    code = "slow_reader"


class ConfigError(QuadrigaError):
    """A flag or a combination of flags that cannot work."""

    code = "config"


class ModelError(QuadrigaError):
    """The model cannot be found, fetched, read or run."""

    code = "model"


class AddressInUse(QuadrigaError):
    """Another process already serves at the endpoint."""

    code = "address_in_use"


def _all_subclasses(cls: type[QuadrigaError]) -> list[type[QuadrigaError]]:
    return [cls] + [s for direct in cls.__subclasses__() for s in _all_subclasses(direct)]


def from_code(
    code: str, message: str, field: str = "", retry_after: float | None = None
) -> QuadrigaError:
    """The exception for an error that came over the wire."""
    for cls in _all_subclasses(QuadrigaError):
        if cls.code == code:
            if issubclass(cls, InvalidRequest):
                return cls(message, field)
            return cls(message, retry_after) if issubclass(cls, QueueFull) else cls(message)
    return QuadrigaError(f"{code}: {message}")
