"""scheduler_proc ⇄ worker_proc."""

import msgspec

# --- scheduler_proc -> worker_proc ----------------------------------------------------------------

EXTEND, DECODE, MIXED = 0, 1, 2
"""ForwardMode on the wire."""


class NewSlot(msgspec.Struct, array_like=True, frozen=True):
    """A request enters a slot.

    token_ids: every token known so far (int32 bytes); computed: how many of them are in the KV
    pages already; pages: its page table (int32 bytes), long enough for the tokens known so far.
    """

    slot: int
    token_ids: bytes
    computed: int
    pages: bytes
    temperature: float
    top_k: int
    top_p: float
    seed: int


class StepPlan(msgspec.Struct, tag="plan", array_like=True, frozen=True):
    """One forward step, as deltas against what the worker keeps of each slot.

    The worker first forgets `released`, then takes in `new`, appends to page tables what `grown`
    says (int32 bytes: slot, page, slot, page, ...), then computes for row i the next num_tokens[i]
    tokens of slots[i]. A row whose computed tokens reach all that is known of its slot samples one
    token, which the worker keeps as that slot's next input.

    Pages may be shared: a row reads what an earlier plan, or an earlier row of this same plan,
    computed. So every row's keys and values of a layer are written before any row attends.
    """

    step: int
    forward_mode: int
    slots: bytes
    num_tokens: bytes
    new: list[NewSlot]
    released: bytes
    grown: bytes = b""


class StopWorker(msgspec.Struct, tag="stop", array_like=True, frozen=True):
    """Nothing follows; leave."""


WorkerMessage = StepPlan | StopWorker


# --- worker_proc -> scheduler_proc ----------------------------------------------------------------


class WorkerReady(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """The KV pool as it came out. Pages are numbered 0 to num_pages - 1."""

    num_pages: int
    page_size: int
    num_slots: int
    dtype: str
    device: str
    pid: int = 0


class StepResult(msgspec.Struct, tag="result", array_like=True, frozen=True):
    """Tokens of a step, one per row of its plan (int32 bytes), -1 for a row that did not sample.

    began, ended: Unix seconds around forward and sampling.
    """

    step: int
    token_ids: bytes
    began: float
    ended: float


ResultMessage = WorkerReady | StepResult
