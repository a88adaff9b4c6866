"""The traces of requests in the frontend: decide, complete, keep and export."""

from collections import OrderedDict

import msgspec

from quadriga import clock, errors
from quadriga.server.config.frontend_args import TraceArgs
from quadriga.server.tracing.context import HeadSampling
from quadriga.server.tracing.export import Exporter
from quadriga.server.tracing.gen_ai import with_conventions
from quadriga.wire.client import MAX_TRACE_IDS, Generate, GetTraces, InfoValues, Traces, is_gateway
from quadriga.wire.trace import RequestTrace, Span, SpanEvent, TraceContext

MAX_KEPT_BYTES = 32 * 1024 * 1024
OVERHEAD_BYTES = 512  # of a trace that is kept, for its keys and its place in the dictionaries
MAX_ANSWER_BYTES = 8 * 1024 * 1024

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RequestTrace).decode


class RingTraces:
    """Decide which requests are traced, and keep the traces of those that have ended.

    Args:
        args: the flags of traces.
        exporter: gets the sampled traces.
        model: name that clients see.
    """

    def __init__(self, args: TraceArgs, exporter: Exporter, model: str = "") -> None:
        self._model = model
        self._sampling = HeadSampling(args.sampling_ratio, args.keep_traces == "all")
        self._exporter = exporter
        self._ready_at = clock.now()
        # By client and id; a trace of each choice, encoded, which takes less memory.
        self._kept: OrderedDict[tuple[bytes, str], dict[int, bytes]] = OrderedDict()
        self._num_bytes = 0

    def context(self, client: bytes, message: Generate) -> TraceContext | None:
        """Return the place of a request in its trace; None: it is not traced.

        The gateway has decided already: it sends a traceparent for what is to be traced.
        """
        traceparent = message.traceparent
        if not traceparent and (self._sampling.is_off or is_gateway(client)):
            return None
        return self._sampling.context(traceparent)

    def take(self, client: bytes, traces: list[RequestTrace]) -> None:
        """Keep and export traces, whose ends are handed to the client now."""
        for trace in traces:
            began_at = trace.ended_at
            if not is_gateway(client):  # the gateway has a span until its client has the answer
                ended_at = max(began_at, clock.now())
                trace.spans.append(Span("deliver", "tokenizer_proc", began_at, ended_at))
            if began_at < self._ready_at:
                trace.spans[-1].events.append(SpanEvent("frontend ready", self._ready_at))
            data = _encode(trace)
            is_new = self._keep(client, trace, data)
            if is_new and trace.context.sampled:
                is_of_web = is_gateway(client)
                self._exporter.put(
                    data if is_of_web else _encode(with_conventions(trace, self._model))
                )

    def _keep(self, client: bytes, trace: RequestTrace, data: bytes) -> bool:
        """Keep a trace. Return whether it is new: an end may be delivered again after a restart."""
        key = client, trace.request_id
        choices = self._kept.get(key, {})
        known = choices.get(trace.index)
        if known is not None and _decode(known).context == trace.context:
            return False
        self._kept[key] = choices | {trace.index: data}
        self._kept.move_to_end(key)
        self._num_bytes += _kept_bytes(data) - _kept_bytes(known)
        while self._num_bytes > MAX_KEPT_BYTES:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= sum(map(_kept_bytes, oldest.values()))
        return True

    def answer(self, client: bytes, message: GetTraces) -> Traces:
        """Return the traces that are kept of a client's requests, as far as a message holds them.

        Raises:
            InvalidRequest: there are too many ids.
        """
        if len(message.request_ids) > MAX_TRACE_IDS:
            raise errors.InvalidRequest(
                f"request_ids has {len(message.request_ids)} ids: at most {MAX_TRACE_IDS} are"
                " allowed; ask for the others with another message",
                "request_ids",
            )
        traces, num_bytes = [], 0
        for request_id in message.request_ids:
            choices = self._kept.get((client, request_id), {})
            for _, data in sorted(choices.items()):
                num_bytes += len(data)
                if num_bytes <= MAX_ANSWER_BYTES:
                    traces.append(_decode(data))
        return Traces(message.request_id, traces)

    def info(self) -> InfoValues:
        """Return the counters of the exporter; empty if nothing is exported."""
        return self._exporter.info()

    def close(self) -> None:
        """Export what is left."""
        self._exporter.close()


def _kept_bytes(trace: bytes | None) -> int:
    """Return the memory that an encoded trace takes; of None, nothing."""
    return 0 if trace is None else len(trace) + OVERHEAD_BYTES
