"""What goes into the scheduler core, and what comes out of it."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quadriga.wire.messages.worker import DraftCost
from scheduler_proc.state.batch import ScheduleBatch
from scheduler_proc.state.request import Request, RequestFailure, RetractReason, WaitReason


class Capacity(NamedTuple):
    """What the worker has room for; without pages, there is no worker yet.

    Attributes:
        prefill_tokens: prompt tokens of one step that keep the worker busy.
        window: number of tokens, itself included, that a token sees in every layer; 0: all.
        can_guess: whether the worker guesses tokens.
        draft_costs: of steps that draft guesses; empty: none does.
        stored: names of the KV pages beyond the pool, joined; None: there are no tiers for them.
    """

    num_pages: int = 0
    page_size: int = 1
    prefill_tokens: int = 0
    window: int = 0
    can_guess: bool = False
    draft_costs: Sequence[DraftCost] = ()
    stored: bytes | None = None


class BatchMode(str, enum.Enum):
    """What a step computes (--batch-mode).

    PREFILL_FIRST: prompts before anything else; but after a chunk the running requests have a
        step, so that a long prompt never stops them for longer than one chunk.
    MIXED: each step decodes and computes prompts, as many as the token budget allows.
    DECODE_FIRST: prompts only as long as one decode step is not full.
    ALTERNATE: one step of prompts, then one decode step.
    """

    PREFILL_FIRST = "prefill-first"
    MIXED = "mixed"
    DECODE_FIRST = "decode-first"
    ALTERNATE = "alternate"


@dataclass(slots=True)
class Plan:
    """The next step; its batch is empty where nothing can run.

    Attributes:
        has_retracted: whether requests left the running batch since its composition began.
        admitted: requests that left the waiting queue.
        retracted: requests that lost slot and pages, and why.
        failed: requests that cannot go on.
        lacked: what the step lacks for the requests that still wait; None where it looked at none
            of them, or admitted all.
    """

    in_flight: bool
    batch: ScheduleBatch = field(default_factory=ScheduleBatch)
    has_retracted: bool = False
    admitted: list[Request] = field(default_factory=list)
    retracted: list[tuple[Request, RetractReason]] = field(default_factory=list)
    failed: list[RequestFailure] = field(default_factory=list)
    lacked: WaitReason | None = None


@dataclass(slots=True)
class StepUpdate:
    """What a step brought: token_ids[i] belongs to request seqs[i].

    Attributes:
        started: requests that have their first token.
        finished: requests that ended by themselves, with a stop token or at their length.
        failed: retracted requests that do not fit into the pool any more.
    """

    seqs: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    started: list[Request] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    failed: list[RequestFailure] = field(default_factory=list)
