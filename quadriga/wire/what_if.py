"""What if: the messages between the gateway and the simulation that it starts."""

import msgspec

MAX_VARIANTS = 6


class MeasuredChoice(msgspec.Struct, array_like=True, frozen=True):
    """A choice that has ended: Unix seconds, and numbers of tokens.

    Attributes:
        client: who shares with others in turns, where the server is fair.
        adapter: name or id of the adapter that has answered; "": none.
    """

    received_at: float
    tokenized_at: float
    admitted_at: float
    first_token_at: float
    last_token_at: float
    ended_at: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    priority: int
    client: str
    num_retractions: int = 0
    adapter: str = ""


class FlagVariant(msgspec.Struct, array_like=True, frozen=True):
    """A column of the answer: its name, and all flags of its simulated server."""

    name: str
    flags: list[str]


class WhatIfJob(msgspec.Struct, frozen=True):
    """What is simulated.

    Attributes:
        choices: the load, by arrival; at least one.
        flags: of the server as it was.
        context_length: of the server's model.
        device: of its worker.
    """

    choices: list[MeasuredChoice]
    flags: list[str]
    variants: list[FlagVariant]
    context_length: int
    device: str


class SpreadMs(msgspec.Struct, frozen=True):
    """Percentiles of durations, in ms."""

    p50: float
    p95: float
    p99: float


class WhatIfColumn(msgspec.Struct, frozen=True):
    """Figures of a run, the measured one or a simulated one.

    Attributes:
        throughput: generated tokens per second.
        retractions: None: it is not known.
        failed: simulated requests that were refused or failed, by code.
        waiting, running: requests that wait and that run, at each `interval_s` of the answer.
    """

    name: str
    queue_wait: SpreadMs | None
    ttft: SpreadMs | None
    tpot: SpreadMs | None
    latency: SpreadMs | None
    throughput: float
    cached_tokens: int
    retractions: int | None
    failed: dict[str, int]
    waiting: list[int]
    running: list[int]


class WhatIfAnswer(msgspec.Struct, frozen=True):
    """The columns: what was measured, the server as it was in the simulator, and the variants.

    Attributes:
        duration_s: from the first arrival to the last end that was measured.
        interval_s: between two items of `waiting` and `running`.
        cost_model: what the steps of the simulation were measured on.
        slowdown: how many times as long as there they are here.
        doubt: why the simulation cannot tell what other flags would do; "" where it can.
    """

    num_requests: int
    duration_s: float
    interval_s: float
    cost_model: str
    slowdown: float
    columns: list[WhatIfColumn]
    doubt: str = ""
