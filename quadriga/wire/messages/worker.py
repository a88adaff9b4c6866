"""scheduler_proc ⇄ worker_proc."""

import msgspec

from quadriga.wire.messages.grammar import GrammarForm
from quadriga.wire.messages.logprobs import PromptPiece, SampledLogprobs

# --- scheduler_proc -> worker_proc ----------------------------------------------------------------

EXTEND, DECODE, MIXED = 0, 1, 2
"""ForwardMode on the wire."""


class SlotSamplingParams(msgspec.Struct, array_like=True, frozen=True):
    """What a slot's tokens are chosen by beyond NewSlot's own fields, as in SamplingParams.

    num_prompt: how many of its tokens are the prompt; the others were generated. The rules depend
    on the known tokens and on nothing else, so that a request goes on in another slot as before.
    bias_ids: int32, bias: float32 [ids]; allowed_ids: int32, empty: all; bad_words: token ids
    (int32) of each; stop_ids: int32, not sampled before min_new_tokens were, and only where the
    grammar may end. grammar: the key of one that the worker has compiled, or empty.
    jumps: forced tokens are taken without a step each.
    logprobs, prompt_logprobs: how many of the likeliest tokens are told; None: nothing is.
    """

    num_prompt: int
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bias_ids: bytes = b""
    bias: bytes = b""
    allowed_ids: bytes = b""
    bad_words: list[bytes] = []
    min_new_tokens: int = 0
    stop_ids: bytes = b""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: bytes = b""
    jumps: bool = False


class NewSlot(msgspec.Struct, array_like=True, frozen=True):
    """A request enters a slot.

    token_ids: every token known so far (int32 bytes); computed: how many of them are in the KV
    pages already; pages: its page table (int32 bytes), long enough for the tokens known so far.
    rules: None where the fields before it say all.
    """

    slot: int
    token_ids: bytes
    computed: int
    pages: bytes
    temperature: float
    top_k: int
    top_p: float
    seed: int
    rules: SlotSamplingParams | None = None


class StepPlan(msgspec.Struct, tag="plan", array_like=True, frozen=True):
    """One forward step, as deltas against what the worker keeps of each slot.

    The worker first forgets `released`, then takes in `new`, appends to page tables what `grown`
    says (int32 bytes: slot, page, slot, page, ...), then computes for row i the next num_tokens[i]
    tokens of slots[i]. A row whose computed tokens reach all that is known of its slot samples one
    token, which the worker keeps as that slot's next input. Where its grammar forced tokens to
    follow, of which the plan may not know, the slot's next row computes them, too, as far as its
    pages hold.

    Pages may be shared: a row reads what an earlier plan, or an earlier row of this same plan,
    computed. So every row's keys and values of a layer are written before any row attends.

    session: that of the WorkerReady; another worker's plans are not run.
    """

    step: int
    forward_mode: int
    slots: bytes
    num_tokens: bytes
    new: list[NewSlot]
    released: bytes
    grown: bytes = b""
    session: int = 0


class CompileGrammar(msgspec.Struct, tag="compile", array_like=True, frozen=True):
    """Compile a grammar beside the steps, answer with GrammarReady, and keep it."""

    grammar: GrammarForm


class ForgetGrammar(msgspec.Struct, tag="forget", array_like=True, frozen=True):
    """No slot has this grammar, and none will before it is compiled again."""

    key: bytes


class ResetWorker(msgspec.Struct, tag="scheduler", array_like=True, frozen=True):
    """Forget every slot and every grammar, and answer with a WorkerReady of a new session."""


class StopWorker(msgspec.Struct, tag="stop", array_like=True, frozen=True):
    """Nothing follows; leave."""


WorkerMessage = StepPlan | CompileGrammar | ForgetGrammar | ResetWorker | StopWorker


# --- worker_proc -> scheduler_proc ----------------------------------------------------------------


class WorkerReady(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """The KV pool as it came out, and what computes. Pages are numbered 0 to num_pages - 1.

    prefill_tokens: of prompts in one step, from where on more of them bring no higher rate.
    session: drawn by the worker when nothing is in its slots; what belongs to another one is stale.
    """

    num_pages: int
    page_size: int
    num_slots: int
    dtype: str
    device: str
    pid: int = 0
    backend: str = ""
    prefill_tokens: int = 256
    session: int = 0


class GrammarReady(msgspec.Struct, tag="grammar", array_like=True, frozen=True):
    """Slots may have this grammar now, unless there is an error: then it is not kept."""

    key: bytes
    error: str = ""
    session: int = 0


class FailedRow(msgspec.Struct, array_like=True, frozen=True):
    """A row of a plan whose request cannot go on. Its token means nothing."""

    row: int
    error: str


class ForcedRow(msgspec.Struct, array_like=True, frozen=True):
    """A row of a plan whose grammar lets nothing but these tokens (int32 bytes) follow the one that
    was sampled. They are known of its slot from now on."""

    row: int
    token_ids: bytes


class StepResult(msgspec.Struct, tag="result", array_like=True, frozen=True):
    """Tokens of a step, one per row of its plan (int32 bytes), -1 for a row that did not sample.

    began, ended: Unix seconds around forward and sampling.
    logprobs, prompt_logprobs: for the slots whose rules ask for them. failed: rows for which the
    grammar had no token; forced: rows for which it leaves more than one token no choice.
    """

    step: int
    token_ids: bytes
    began: float
    ended: float
    logprobs: SampledLogprobs | None = None
    prompt_logprobs: list[PromptPiece] = []
    failed: list[FailedRow] = []
    session: int = 0
    forced: list[ForcedRow] = []


ResultMessage = WorkerReady | GrammarReady | StepResult
