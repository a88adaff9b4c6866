"""Plans by which a worker warms up, measures and checks itself."""

from collections.abc import Iterable

from msgspec import structs

from quadriga.sampling.pooling import Pooling
from quadriga.wire.packing import pack_ids
from quadriga.wire.worker import DECODE, EXTEND, NewSlot, StepPlan

NO_STEP = -1  # no plan of the scheduler has this number


def prefill_plan(
    num_tokens: int,
    page_size: int,
    num_rows: int = 1,
    temperature: float = 0.0,
    top_p: float = 1.0,
    pooling: Pooling | None = None,
) -> StepPlan:
    """Return a plan that admits prompts of `num_tokens` tokens 0 to slots 0 to `num_rows` - 1.

    Their pages are numbered from 0 on, and they are computed as a whole. With a `pooling` they give
    vectors, which a model without a head has to.
    """
    num_pages = -(-num_tokens // page_size)
    token_ids = pack_ids([0] * num_tokens)
    new = [
        NewSlot(
            slot=slot,
            token_ids=token_ids,
            computed=0,
            pages=pack_ids(range(slot * num_pages, (slot + 1) * num_pages)),
            temperature=temperature,
            top_k=-1,
            top_p=top_p,
            seed=slot,
            pooling=pooling,
        )
        for slot in range(num_rows)
    ]
    return _plan(EXTEND, num_rows, num_tokens, new=new)


def spread_plan(num_tokens: int, page_size: int, vocab_size: int) -> StepPlan:
    """Return a plan that admits a prompt of tokens from all over the vocabulary to slot 0."""
    plan = prefill_plan(num_tokens, page_size)
    token_ids = pack_ids(i * vocab_size // num_tokens for i in range(num_tokens))
    return structs.replace(plan, new=[structs.replace(plan.new[0], token_ids=token_ids)])


def pooled_plan(plan: StepPlan, pooling: Pooling) -> StepPlan:
    """Return a plan whose new slots give vectors, and sample nothing."""
    new = [structs.replace(slot, pooling=pooling, rules=None) for slot in plan.new]
    return structs.replace(plan, new=new)


def adapted_plan(plan: StepPlan, adapter: int) -> StepPlan:
    """Return a plan whose new slots have an adapter."""
    new = [structs.replace(slot, adapter=adapter) for slot in plan.new]
    return structs.replace(plan, new=new)


def decode_plan(new_pages: Iterable[int]) -> StepPlan:
    """Return a plan that decodes one token of slot 0, whose table may get pages before."""
    return _plan(DECODE, 1, 1, grown=pack_ids(i for page in new_pages for i in (0, page)))


def release_plan(num_slots: int = 1) -> StepPlan:
    """Return a plan that releases slots 0 to `num_slots` - 1."""
    return _plan(DECODE, 0, 0, released=pack_ids(range(num_slots)))


def _plan(
    mode: int,
    num_rows: int,
    num_tokens: int,
    new: list[NewSlot] | None = None,
    released: bytes = b"",
    grown: bytes = b"",
) -> StepPlan:
    return StepPlan(
        step=NO_STEP,
        forward_mode=mode,
        slots=pack_ids(range(num_rows)),
        num_tokens=pack_ids([num_tokens] * num_rows),
        new=new or [],
        released=released,
        grown=grown,
    )
