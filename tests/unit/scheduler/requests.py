"""Requests as policies, the prefix tree and the rules of speculation see them."""

from quadriga.sampling.params import SamplingParams
from quadriga.wire.packing import pack_ids
from quadriga.wire.to_scheduler import Submit
from quadriga.wire.worker import StepResult
from scheduler_proc.planning.speculation import MIN_PLAIN, GuessPolicy
from scheduler_proc.state.batch import ScheduleBatch
from scheduler_proc.state.kv_cache import KVCache
from scheduler_proc.state.request import Request
from tests.unit.simulation import submit

PROMPT = [5, 6, 7]


def waiting_request(
    seq: int,
    prompt: int = 10,
    new: int = 10,
    *,
    client: bytes = b"c",
    priority: int = 0,
    received: float | None = None,
) -> Request:
    """Return a waiting request; unless `received` is given, they arrive a second apart."""
    message = Submit(
        client=client,
        request_id=str(seq),
        prompt_ids=pack_ids([1] * prompt),
        params=SamplingParams(max_new_tokens=new, seed=0),
        stream=True,
        received_at=1_790_000_000.0 + seq if received is None else received,
        tokenized_at=0.0,
        priority=priority,
    )
    return Request.from_submit(seq, message, frozenset())


def request_of_tokens(tokens: list[int], seq: int = 0) -> Request:
    params = SamplingParams(max_new_tokens=1, seed=0)
    message = Submit(b"c", str(seq), pack_ids(tokens), params, True, 0.0, 0.0)
    return Request.from_submit(seq, message, frozenset())


def request_of(number: int, max_new_tokens: int = 100) -> Request:
    message = submit(f"r{number}", PROMPT, max_new_tokens)
    request = Request.from_submit(number, message, frozenset())
    request.slot, request.num_computed_tokens = number, len(PROMPT)
    request.num_known_tokens = len(PROMPT) + 1
    return request


def batch_of(requests: list[Request], kv: KVCache) -> ScheduleBatch:
    for request in requests:
        kv.append_page(request)
    batch = ScheduleBatch()
    batch.add_decodes(requests)
    return batch


def planned(
    policy: GuessPolicy, requests: list[Request], kv: KVCache | None = None
) -> list[int] | None:
    kv = kv or KVCache(1000, 16)
    batch = batch_of(requests, kv)
    policy.plan(batch, kv)
    return batch.num_guesses


def observe_plain(policy: GuessPolicy, num_rows: int) -> None:
    """Let steps without guesses take a second."""
    requests = [request_of(number) for number in range(num_rows)]
    batch = ScheduleBatch(requests=requests, num_tokens=[1] * num_rows, num_decodes=num_rows)
    for _ in range(MIN_PLAIN):
        policy.observe(batch, StepResult(0, b"", 1.0, 2.0))


def jain(shares: list[float]) -> float:
    """Return Jain's index of fairness: 1 for equal shares, 1/n where one has all."""
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))
