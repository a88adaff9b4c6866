"""A load of resumable HTTP streams, whose clients resume until they have every event.

Among them are those of responses in the background, which are numbered from 0 by themselves.
"""

import asyncio
import itertools
import re
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp

STREAMS = 64
MAX_TOKENS = 100
RETRY_S = 0.05
# Longer than the watchdog of the tests: a gateway that stands still is replaced.
SILENCE_S = 20.0
# What a gateway answers that is not ready, or cannot reach the ring now.
BUSY = (429, 502, 503, 504)
# What differs between two runs of one request: times, ids made of the answer's, and the last digits
# of log-probabilities, which depend on the batch.
_DIFFERENCES = re.compile(
    rb'"timings":\{[^}]*\}|"(?:created|created_at|completed_at)":\d+|"cached_tokens":\d+'
    rb"|(?:msg|rs|fc)_[0-9a-f]{32}"
    rb"|(?<=[:\[])-?[0-9]+[.][0-9]+(?:e-?[0-9]+)?"
)
_ENDS = (b"data: [DONE]", b"event: response.completed", b"event: response.incomplete",
         b"event: message_stop")  # fmt: skip

# The numbers of the events, and their bytes.
Answer = tuple[list[int], bytes]


class WrongStream(Exception):
    """A stream that was lost, or has a gap or an event twice."""


def request_of(number: int) -> tuple[str, dict[str, Any]]:
    """Return path and body of a request; the kinds take turns."""
    common = {"temperature": 0, "ignore_eos": True, "stream": True}
    text, few = "word " * (1 + number % 40), MAX_TOKENS // 2
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}],
                                  "max_tokens": MAX_TOKENS, "resumable": True}),
        ("/v1/completions", {"prompt": text, "max_tokens": MAX_TOKENS, "resumable": True}),
        ("/v1/completions", {"prompt": [text, "other"], "n": 2, "max_tokens": few,
                             "logprobs": 1, "temperature": 1, "resumable": True}),
        ("/v1/responses", {"input": text, "max_output_tokens": MAX_TOKENS, "resumable": True}),
        ("/v1/responses", {"input": text, "max_output_tokens": MAX_TOKENS, "background": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "n": 2,
                                  "max_tokens": MAX_TOKENS, "resumable": True,
                                  "first_token_ids": [40 + number % 9] * few}),
    ]  # fmt: skip
    path, body = kinds[number % len(kinds)]
    return path, common | body | ({"seed": number} if "n" in body else {})


class ResumedStreams:
    """Streams of one server.

    Args:
        url: of the gateway, or of a proxy before it.
        timeout_s: a stream that takes longer counts as lost.
        models: names of models, which the streams have in turns; none: the only one.

    Attributes:
        started: set when each stream has an event.
        arrivals: times of events.
        num_resumed: connections beside the first of each stream.
    """

    def __init__(
        self, url: str, timeout_s: float, num_streams: int = STREAMS, models: Sequence[str] = ()
    ) -> None:
        self._url = url
        self._models = models
        self._timeout_s = timeout_s
        self._num_streams = num_streams
        self._run = uuid.uuid4().hex[:8]
        self._num_started = 0
        self._asked: set[str] = set()
        self.started = asyncio.Event()
        self.arrivals: list[float] = []
        self.num_resumed = 0

    async def run(self) -> list[Answer | Exception]:
        """Return the answer of each stream, or what went wrong."""
        limits = aiohttp.ClientTimeout(total=None, sock_read=SILENCE_S, sock_connect=SILENCE_S)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(timeout=limits, connector=connector) as session:
            streams = (self._stream(session, number) for number in range(self._num_streams))
            found = await asyncio.gather(*streams, return_exceptions=True)
        self.started.set()
        return [self._comparable(each) for each in found]

    def silence_after(self, moment: float) -> float:
        """Return the seconds from a moment to the end of the longest silence after it."""
        later = [moment, *sorted(at for at in self.arrivals if at > moment)]
        gaps = [(end - begin, end) for begin, end in itertools.pairwise(later)]
        return max(gaps)[1] - moment if gaps else 0.0

    async def _stream(self, session: aiohttp.ClientSession, number: int) -> list[bytes]:
        events: list[bytes] = []
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                await self._read(session, number, events)
                if events and any(end in events[-1] for end in _ENDS):
                    return events
            except (aiohttp.ClientError, ConnectionError, asyncio.TimeoutError):
                pass
            if time.monotonic() > deadline:
                raise WrongStream(f"stream {number} has {len(events)} events in time")
            self.num_resumed += 1
            await asyncio.sleep(RETRY_S)

    async def _read(self, session: aiohttp.ClientSession, number: int, events: list[bytes]) -> None:
        """Read the rest of a stream, as far as the connection goes."""
        path, body = request_of(number)
        if self._models:
            body |= {"model": self._models[number % len(self._models)]}
        name = f"{self._run}-{number}"
        headers = {"X-Request-Id": name, "Last-Event-ID": str(len(events))}
        in_background = "background" in body
        if in_background and name in self._asked:
            query = {"stream": "true"}
            query |= {"starting_after": str(len(events) - 1)} if events else {}
            asked = session.get(f"{self._url}{path}/resp_{name}", params=query)
        elif events:
            asked = session.get(f"{self._url}/v1/streams/{name}", headers=headers)
        else:
            self._asked.add(name)
            asked = session.post(self._url + path, json=body, headers=headers)
        async with asked as response:
            if response.status in BUSY:
                return
            if response.status == 404 and in_background and not events:
                self._asked.discard(name)  # the request did not arrive
                return
            if response.status != 200:
                raise WrongStream(f"stream {number}: {response.status} {await response.text()}")
            async for event in _events(response):
                if event.startswith(b"event: keepalive\n"):
                    continue  # of a pause, without a meaning or a number
                place = b'"sequence_number":%d,' if in_background else b"id: %d\n"
                if place % (len(events) + (not in_background)) not in event:
                    raise WrongStream(f"stream {number} after {len(events)} events: {event!r}")
                if b'"error":{' in event:
                    raise WrongStream(f"stream {number}: {event!r}")
                self._note(events)
                events.append(event)

    def _note(self, events: list[bytes]) -> None:
        self.arrivals.append(time.monotonic())
        self._num_started += not events
        if self._num_started == self._num_streams:
            self.started.set()

    def _comparable(self, found: "list[bytes] | BaseException") -> Answer | Exception:
        if isinstance(found, Exception):
            return found
        assert isinstance(found, list)
        data = _DIFFERENCES.sub(b"", b"".join(found)).replace(self._run.encode(), b"")
        return list(range(1, len(found) + 1)), data


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield whole events; a part of one at the end is left out, and so are comments."""
    rest = b""
    async for data in response.content.iter_any():
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            if not event.startswith(b":"):
                yield event + b"\n\n"
