"""scheduler_proc ⇄ worker_proc, and rank 0 of a worker -> its ranks on other machines.

First the messages about KV pages that are copied to the tiers beyond the pool and back, then those
of the steps, in both directions.
"""

import msgspec

from quadriga.sampling.pooling import Pooling
from quadriga.wire.adapter import AdapterRef
from quadriga.wire.grammar import GrammarForm
from quadriga.wire.logprobs import PromptPiece, SampledLogprobs

# scheduler_proc ⇄ worker_proc: KV pages that are copied to the tiers beyond the pool, and back.

# --- scheduler_proc -> worker_proc ----------------------------------------------------------------


class StorePages(msgspec.Struct, tag="store", array_like=True, frozen=True):
    """Copy pages of the pool to the tiers beyond it, in parallel to the steps.

    Earlier plans have computed them. A page that a later plan writes to before it is copied is not
    stored. Each page is answered in StoredPages.

    Attributes:
        pages: int32 bytes.
        hashes: PAGE_HASH_BYTES for each page.
        session: of the worker that has computed them; another one has other pages there.
    """

    pages: bytes
    hashes: bytes
    session: int = 0


class LoadPages(msgspec.Struct, tag="load", array_like=True, frozen=True):
    """Copy pages from the tiers to the pool, in parallel to the steps; answered by PagesLoaded.

    No plan uses these pages until then.

    Attributes:
        load: number of the load.
        pages: int32 bytes.
        hashes: PAGE_HASH_BYTES for each page.
        session: of the worker that is asked.
        is_ahead: no request waits for the pages yet. Loads for which one does go first, and end
            this one with what has come.
    """

    load: int
    pages: bytes
    hashes: bytes
    session: int = 0
    is_ahead: bool = False


# --- worker_proc -> scheduler_proc ----------------------------------------------------------------


class StoredPages(msgspec.Struct, tag="stored", array_like=True, frozen=True):
    """Which pages can be loaded from the tiers, beyond what was said before.

    Attributes:
        added: PAGE_HASH_BYTES for each page that can be loaded from now on.
        removed: for each that cannot, or that was not stored.
        num_damaged: pages among `removed` whose file was not what was written.
        disk_failed: whether the disk takes no pages at present.
    """

    added: bytes
    removed: bytes
    session: int = 0
    num_damaged: int = 0
    disk_failed: bool = False


class PagesLoaded(msgspec.Struct, tag="loaded", array_like=True, frozen=True):
    """The first pages of a load are in the pool; the others were not found.

    Attributes:
        seconds: from the beginning of the load to its end.
        num_fetched: number of pages that were read from the tiers of other replicas.
        num_damaged: number of pages there that were not what was written.
    """

    load: int
    num_loaded: int
    session: int = 0
    seconds: float = 0.0
    num_fetched: int = 0
    num_damaged: int = 0


# scheduler_proc ⇄ worker_proc: the steps.

# --- scheduler_proc -> worker_proc ----------------------------------------------------------------

# ForwardMode on the wire.
EXTEND, DECODE, MIXED = 0, 1, 2


class WantedLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities of tokens that a client chose, beside the likeliest ones.

    Attributes:
        num_top: number of likeliest tokens per position.
        token_ids: int32 [ids]; their log-probabilities follow those of the likeliest tokens.
    """

    num_top: int
    token_ids: bytes


class SlotSamplingParams(msgspec.Struct, array_like=True, frozen=True):
    """Sampling parameters of a slot beyond NewSlot's fields, as in SamplingParams.

    Their effect depends on the known tokens only, so that a request can continue in another slot.

    Attributes:
        num_prompt: number of prompt tokens; the other tokens were generated.
        bias_ids: int32 [ids].
        bias: float32 [ids].
        allowed_ids: int32 [ids]; empty: all ids.
        bad_words: token ids (int32) of each.
        stop_ids: int32 [ids]; masked before min_new_tokens, and where the grammar may not end.
        logprobs, prompt_logprobs: number of likeliest tokens per position, perhaps with further
            ids; None: no logprobs.
        grammar: key of a grammar that the worker has compiled, or empty.
        jumps: take forced tokens without a step each.
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
    logprobs: int | WantedLogprobs | None = None
    prompt_logprobs: int | None = None
    grammar: bytes = b""
    jumps: bool = False


# The place of a slot whose rows only the model itself computes.
NO_ADAPTER = -1


class NewSlot(msgspec.Struct, array_like=True, frozen=True):
    """A request enters a slot.

    Attributes:
        token_ids: all known tokens, int32 bytes.
        computed: number of tokens whose KV is in the pages already.
        pages: page table, int32 bytes, with room for the tokens of the slot's first row. With a
            window in every layer, pages before the window of the next token are not held: their
            entries are 0, or pages that another slot has by now.
        rules: further sampling parameters; None: the other fields suffice.
        pooling: the slot's last prompt row gives a vector, and samples nothing.
        adapter: place of the adapter that was loaded for the slot's rows; NO_ADAPTER: none.
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
    pooling: Pooling | None = None
    adapter: int = NO_ADAPTER


class StepPlan(msgspec.Struct, tag="plan", array_like=True, frozen=True):
    """One forward step, as changes to the worker's state of each slot.

    The worker frees the slots in `released`, fills those in `new`, and appends the pages in `grown`
    (int32 bytes: slot, page, slot, page, …). Then row i computes the next num_tokens[i] tokens of
    slots[i]. A row that reaches the last known token of its slot samples one token, which is the
    slot's next input. If the grammar forces tokens after it, of which the plan may not know, the
    slot's next row computes them, too, as far as its pages reach.

    Pages may be shared: a row may read what an earlier plan, or an earlier row of this plan,
    computes. So all rows write the keys and values of a layer before any row attends.

    In a row that reaches the last known token of its slot, the worker may guess up to
    num_guesses[i] further tokens. The row computes them, too, and samples after each of them.

    Attributes:
        session: session of the WorkerReady; plans of another session are not run.
        num_guesses: int32 bytes, one per row; empty: none in every row.
        groups: for each of `new`, the name of the requests from whose answers it may be guessed;
            empty: nothing is guessed in them.
    """

    step: int
    forward_mode: int
    slots: bytes
    num_tokens: bytes
    new: list[NewSlot]
    released: bytes
    grown: bytes = b""
    session: int = 0
    num_guesses: bytes = b""
    groups: list[bytes] = []


class CompileGrammar(msgspec.Struct, tag="compile", array_like=True, frozen=True):
    """Compile a grammar in parallel to the steps, keep it, and answer with GrammarReady."""

    grammar: GrammarForm


class ForgetGrammar(msgspec.Struct, tag="forget", array_like=True, frozen=True):
    """Discard a grammar that no slot uses."""

    key: bytes


class LoadAdapter(msgspec.Struct, tag="load_adapter", array_like=True, frozen=True):
    """Load an adapter in parallel to the steps, and answer with AdapterReady.

    Its files are read unless it is in memory already, where it stays until EvictAdapter.

    Attributes:
        place: from 0 to --max-loras - 1, with no adapter in it.
        session: as in StepPlan.
    """

    adapter: AdapterRef
    place: int
    session: int = 0


class ForgetAdapter(msgspec.Struct, tag="forget_adapter", array_like=True, frozen=True):
    """Free the place of an adapter that no slot uses, also one that is being loaded.

    It stays in memory.
    """

    place: int
    session: int = 0


class EvictAdapter(msgspec.Struct, tag="evict_adapter", array_like=True, frozen=True):
    """Free the host memory of an adapter that has no place.

    Attributes:
        id: as in AdapterRef.
    """

    id: str
    session: int = 0


class ResetWorker(msgspec.Struct, tag="reset", array_like=True, frozen=True):
    """Forget every slot, grammar and adapter, and answer with a WorkerReady of a new session."""


class StopWorker(msgspec.Struct, tag="stop", array_like=True, frozen=True):
    """Exit; no message follows."""


WorkerMessage = (
    StepPlan
    | CompileGrammar
    | ForgetGrammar
    | LoadAdapter
    | ForgetAdapter
    | EvictAdapter
    | StorePages
    | LoadPages
    | ResetWorker
    | StopWorker
)


# --- worker_proc -> scheduler_proc ----------------------------------------------------------------


class DraftCost(msgspec.Struct, array_like=True, frozen=True):
    """Seconds of a step that drafts tokens in `num_rows` rows."""

    num_rows: int
    seconds: float


class WorkerReady(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """Size of the KV pool, and what computes. Pages are numbered 0 to num_pages - 1.

    Attributes:
        prefill_tokens: number of prompt tokens in one step beyond which the rate does not rise.
        session: drawn by the worker when its slots are empty; messages of another one are stale.
        window: number of tokens, itself included, that a token sees in every layer; 0: all.
        can_guess: the worker guesses tokens where a plan says so.
        stored: PAGE_HASH_BYTES for each page that can be loaded from a tier beyond the pool; None:
            there is no such tier.
        fetches: pages can be loaded from the tiers of other replicas, too; which these have is not
            known.
        page_bytes: size of a page in a tier; 0 without tiers.
        cuda_graph: decode steps are CUDA graphs.
        kernels: what computes, its version, and the number formats; "": unknown.
        is_encoder: every row has a vector, and is computed whole: no page has a past to share.
        draft_costs: measured where steps draft guesses, by ascending numbers of rows; empty:
            guesses take no steps of their own.
        started_at: when the process began, in ns of the system's monotonic clock.
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
    window: int = 0
    can_guess: bool = False
    stored: bytes | None = None
    cuda_graph: bool = False
    kernels: str = ""
    draft_costs: list[DraftCost] = []
    is_encoder: bool = False
    started_at: int = 0
    fetches: bool = False
    page_bytes: int = 0


class GrammarReady(msgspec.Struct, tag="grammar", array_like=True, frozen=True):
    """A grammar can be used by slots; with an error, it was not kept."""

    key: bytes
    error: str = ""
    session: int = 0


class AdapterReady(msgspec.Struct, tag="adapter", array_like=True, frozen=True):
    """Slots can have the adapter in a place; with an error, none is there.

    Attributes:
        id: as in AdapterRef.
        seconds: that the load took.
    """

    id: str
    place: int
    error: str = ""
    session: int = 0
    seconds: float = 0.0


class FailedRow(msgspec.Struct, array_like=True, frozen=True):
    """A row of a plan whose request cannot continue; its token is invalid.

    Attributes:
        code: of the error, see quadriga/errors.py.
    """

    row: int
    error: str
    code: str = "invalid_request"


class NonFiniteRow(msgspec.Struct, array_like=True, frozen=True):
    """A row of a plan whose request has keys or values that are NaN or infinite.

    Attributes:
        position: of its first token that may have them.
    """

    row: int
    position: int


class ForcedRow(msgspec.Struct, array_like=True, frozen=True):
    """A row of a plan whose grammar forces these tokens (int32 bytes) after the sampled one.

    They are known tokens of the slot from now on.
    """

    row: int
    token_ids: bytes


class GuessedRow(msgspec.Struct, array_like=True, frozen=True):
    """A row of a plan in which the worker guessed tokens.

    A guess is right if it equals the token that was sampled in its place. What was sampled after a
    wrong guess does not count, and its keys and values are overwritten by the slot's next row.

    Attributes:
        num_guesses: number of guesses; at most that of the plan, and so that at least one token
            more has a page.
        token_ids: int32 bytes: a token for each right guess, sampled after it. They follow the
            row's own token, and are known tokens of the slot. All but the last are computed.
    """

    row: int
    num_guesses: int
    token_ids: bytes


class VectorRow(msgspec.Struct, array_like=True, frozen=True):
    """A row of a plan whose answer is a vector (float32 bytes)."""

    row: int
    vector: bytes


class StepResult(msgspec.Struct, tag="result", array_like=True, frozen=True):
    """Result of a step.

    Attributes:
        token_ids: int32 bytes, one per row of the plan; -1 for a row that did not sample.
        began, ended: Unix seconds around forward and sampling.
        logprobs, prompt_logprobs: log-probabilities that slots request; those of a row's further
            tokens follow in order.
        failed: rows whose grammar allows no token, whose logits are not finite, or whose request
            holds an id that the model does not have.
        forced: rows whose grammar forces further tokens.
        guessed: rows with guesses, whose further tokens come before the forced ones.
        nonfinite: rows whose pages must not be shared from some position on.
        vectors: rows whose answers are vectors.
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
    guessed: list[GuessedRow] = []
    nonfinite: list[NonFiniteRow] = []
    vectors: list[VectorRow] = []


ResultMessage = WorkerReady | GrammarReady | AdapterReady | StepResult | StoredPages | PagesLoaded


# Rank 0 of a worker -> ranks on other machines: these, and every message that rank 0 receives.


class JoinRanks(msgspec.Struct, tag="join", array_like=True, frozen=True):
    """The first message: load the model's part and join the other ranks.

    Attributes:
        meeting: tcp://HOST:PORT at which the ranks find each other.
        lifeline: address to which the rank keeps a connection; rank 0 has ended when it breaks.
        version: rank 0's version of quadriga, without which a rank refuses to join.
    """

    meeting: str
    lifeline: str
    version: str = ""


RankMessage = JoinRanks | WorkerMessage
