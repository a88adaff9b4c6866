"""Answer a call by the function of its API, and observe it, for HTTP, batches and streams."""

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager

import msgspec

from http_proc.core import errors, gen_ai, observe, resumption, session, streaming
from http_proc.core.call import Call
from http_proc.core.caller import Caller, current_caller, set_caller
from http_proc.core.gateway import Gateway, Key
from http_proc.core.recorder import begin_recording
from quadriga.errors import QuadrigaError
from quadriga.server.processes.logs import in_a_line

Answerer = Callable[[Gateway, Call, streaming.EventSink], Awaitable[object | None]]
"""Returns the body of a whole answer; None: the answer went to the sink as a stream."""

APIS = Key[dict[str, Answerer]]("apis")
"""By the path of the endpoint."""


async def answer(
    gateway: Gateway, call: Call, caller: Caller, sink: streaming.EventSink
) -> bytes | None:
    """Answer a call. This task answers nothing else meanwhile.

    Args:
        gateway: its state.
        call: what is asked.
        caller: who asks.
        sink: takes the events, if the answer is a stream.

    Returns:
        The JSON of a whole answer; None: the answer went to the sink.

    Raises:
        Exception: whatever prevents the answer; `api_error_of` converts it.
    """
    set_caller(caller)
    resumption.set_resumption(call.resumption)
    session.set_session(call.session)
    recording = begin_recording(gateway, call)
    body = await gateway[APIS][call.path](gateway, call, sink)
    if recording is not None:
        recording.end(call.record)
    return None if body is None else msgspec.json.encode(body)


def api_error_of(error: Exception, record: observe.CallRecord) -> errors.ApiError:
    """Convert what a call has raised. An unexpected exception is logged and becomes a 500."""
    if isinstance(error, errors.ApiError):
        return error
    if isinstance(error, QuadrigaError):
        return errors.from_server(error, {})
    logging.error("%s failed", in_a_line(f"{record.method} {record.path}"), exc_info=error)
    return errors.ApiError(500, "the gateway failed on this request; its log says why")


def note_failure(gateway: Gateway, record: observe.CallRecord, error: errors.ApiError) -> None:
    """Note and count the error that answers a call."""
    record.failed(error)
    gateway.metrics.count_error(record, record.code or str(error.status))


@contextmanager
def observed(gateway: Gateway, record: observe.CallRecord, traceparent: str) -> Iterator[None]:
    """Trace and log a call of a `with` block: its answer, and the sending of it.

    Args:
        gateway: its state.
        record: what is known of the call.
        traceparent: the header of the client; "" without one.
    """
    trace = gateway.traces.begin(traceparent, record) if record.method == "POST" else None
    with ExitStack() as stack:
        if trace is not None:
            stack.enter_context(observe.as_current(trace))
        try:
            yield
        finally:
            observe.log_request(record, gateway.log_level)
            gateway.gen_ai.count(record)
            if trace is not None:
                trace.tenant = current_caller().name
                own = gateway.traces.finish(trace, record)
                if trace.context.sampled:
                    gateway.traces.export(gen_ai.exported(own, record, trace))
