"""Three fixed loads for a scheduler: messages on the wire, with their times of arrival."""

import operator
import random
from dataclasses import dataclass, field
from typing import Any

from quadriga.wire.packing import pack_ids
from tests.unit.recorded_server import NUM_IDS, START_S, Wire

PAGE_SIZE = 16
CLIENTS = (b"alice", b"robot", b"batch-job")


@dataclass
class Trace:
    """The messages that a scheduler gets, and its flags.

    Attributes:
        num_pages: size of the KV pool.
        messages: microsecond and message, sorted by time.
        stops: as in Server.
    """

    num_pages: int
    flags: dict[str, Any]
    messages: list[tuple[int, Wire]] = field(default_factory=list)
    stops: dict[str, int] = field(default_factory=dict)

    def add(self, at_us: int, *message: Any) -> None:
        self.messages.append((at_us, list(message)))
        self.messages.sort(key=operator.itemgetter(0))


def submit(
    at_us: int,
    name: str,
    client: bytes,
    prompt: list[int],
    params: dict[str, Any],
    priority: int = 0,
    queue_s: float | None = None,
    whole_s: float | None = None,
    **rest: Any,
) -> Wire:
    """Return a request that arrives at a time.

    Args:
        at_us: microsecond of its arrival.
        name: its id.
        client: routing id of the client.
        prompt: token ids.
        priority: as in Submit.
        params: sampling parameters that differ from greedy ones.
        queue_s: seconds until the request must be admitted.
        whole_s: seconds until the request must have ended.
        rest: bad_words, grammar, resent and again, as on the wire.
    """
    at = START_S + at_us / 1e6
    return [
        "submit",
        client,
        name,
        pack_ids(prompt),
        {"temperature": 0.0, "top_k": -1, "top_p": 1.0, **params},
        True,
        at - 0.002,
        at - 0.001,
        priority,
        None if queue_s is None else at + queue_s,
        None if whole_s is None else at + whole_s,
        rest.get("bad_words", []),
        rest.get("grammar"),
        rest.get("resent", False),
        rest.get("again", False),
    ]


def steady() -> Trace:
    """Return mixed requests at an even rate, of which four groups share prefixes."""
    source = random.Random(1)
    trace = Trace(300, {"max_batch_size": 8, "max_running_requests": 12})
    prefixes = [_ids(source, 40 + 16 * number) for number in range(4)]
    asked: list[list[int]] = []
    for number in range(48):
        prompt = prefixes[source.randrange(4)] if source.random() < 0.7 else []
        if asked and source.random() < 0.2:
            prompt = asked[source.randrange(len(asked))]
        prompt = prompt + _ids(source, source.randint(2, 40))
        asked.append(prompt)
        params = {
            "max_new_tokens": source.randint(2, 24),
            "seed": number,
            "ignore_eos": source.random() < 0.5,
            "temperature": source.choice([0.0, 0.7, 1.0]),
        }
        at_us = 4000 * number
        client = CLIENTS[source.randrange(3)]
        trace.add(at_us, *submit(at_us, f"s{number}", client, prompt, params, number % 4 * 6))
    trace.add(100_000, "info", b"alice", "info", {})
    trace.add(10_000_000, "drain")
    return trace


def bursty() -> Trace:
    """Return bursts of long prompts for a pool that cannot hold what they generate."""
    source = random.Random(2)
    flags = {
        "max_batch_size": 5,
        "prefill_max_tokens": 256,
        "chunked_prefill_size": 96,
        "max_running_requests": 12,
        "schedule_conservativeness": 0.1,
    }
    trace = Trace(36, flags)
    for number in range(24):
        at_us = 45_000 * (number // 8)
        prompt = _ids(source, source.choice([10, 20, 20, 30, 190]) + source.randint(0, 20))
        params = {
            "max_new_tokens": source.choice([4, 70, 80]) + source.randint(0, 20),
            "seed": number,
            "ignore_eos": True,
        }
        client = CLIENTS[number % 8 % 3 % 2]
        trace.add(at_us, *submit(at_us, f"b{number}", client, prompt, params, number % 5 * 4))
    params = {"max_new_tokens": 500, "seed": 99, "ignore_eos": True}
    trace.add(50_000, *submit(50_000, "too long", b"robot", _ids(source, 400), params))
    trace.add(5_000_000, "info", b"alice", "info", {}, True)
    trace.add(10_000_000, "abort_all", "the end of the trace")
    trace.add(10_000_001, "shutdown")
    return trace


def priorities() -> Trace:
    """Return requests with priorities, deadlines, aborts, stops and every sampling rule."""
    source = random.Random(3)
    flags = {
        "max_batch_size": 5,
        "prefill_max_tokens": 200,
        "max_running_requests": 6,
        "max_queued_requests": 24,
    }
    trace = Trace(60, flags)
    shared = _ids(source, 50)
    for number in range(48):
        at_us = 1000 * number + 90_000 * (number // 24)
        name, client = f"p{number}", CLIENTS[source.randrange(3)]
        prompt = shared[: source.choice([0, 20, 50])] + _ids(source, source.randint(1, 60))
        params: dict[str, Any] = {"max_new_tokens": source.randint(1, 32), "seed": 7 * number}
        rest: dict[str, Any] = {}
        _add_extras(number, params, rest)
        queue_s, whole_s = source.choice([(None, None)] * 4 + [(0.03, None), (0.02, 0.06)])
        message = submit(
            at_us, name, client, prompt, params, source.randint(-20, 20), queue_s, whole_s, **rest
        )
        trace.add(at_us, *message)
        if number % 9 == 4:
            trace.add(at_us + source.randint(1, 60_000), "abort", client, name, "client")
        if number % 11 == 5:
            trace.stops[name] = source.randint(1, 4)
        if number == 30:
            resent = [*message[:-2], True, False]
            trace.add(at_us + 5000, *resent)
            trace.add(at_us + 2_000_000, *resent)
    trace.add(60_000, "abort", b"robot", "", "client_lost")
    trace.add(70_000, "detok", 0)
    trace.add(150_000, "frontend_restarted")
    trace.add(160_000, "info", b"alice", "info", {"known": 1}, True)
    trace.add(10_000_000, "info", b"alice", "info again", {})
    trace.add(10_000_001, "drain")
    trace.add(10_000_002, "shutdown")
    return trace


def _add_extras(number: int, params: dict[str, Any], rest: dict[str, Any]) -> None:
    """Give every other request something that few requests ask for."""
    if number % 6 == 1:
        params["n"] = 3
    if number % 7 == 2:
        params |= {"logprobs": number % 4, "prompt_logprobs": number % 3}
    if number % 8 == 3:
        text = ["root ::= a", "root ::= b", "empty"][number // 8 % 3]
        rest["grammar"] = [f"key of {text:9.9}".encode(), text]
    if number % 9 == 5:
        params |= {"stop_token_ids": list(range(100, 200)), "min_new_tokens": 3}
    if number % 10 == 6:
        params |= {"min_p": 0.125, "repetition_penalty": 1.25, "frequency_penalty": 0.5}
    if number % 10 == 7:
        params |= {"presence_penalty": -0.5, "logit_bias": {5: 1.5, 9: -100.0}}
    if number % 10 == 8:
        params["allowed_token_ids"] = [5, 6, 7]
        rest["bad_words"] = [pack_ids([5]), pack_ids([6, 7])]
    if number % 12 == 9:
        params |= {"stop": ["\n\n"], "stop_regex": "a+b", "include_stop_str_in_output": True}


def _ids(source: random.Random, count: int) -> list[int]:
    return [source.randrange(3, NUM_IDS) for _ in range(count)]


TRACES = {"steady": steady, "bursty": bursty, "priorities": priorities}
