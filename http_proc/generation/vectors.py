"""Many prompts whose answers are vectors, as the requests of one call."""

import itertools
from collections.abc import Mapping, Sequence

from http_proc.core.call import Call
from http_proc.core.errors import invalid
from http_proc.core.gateway import Gateway
from http_proc.core.served_model import ServedModel
from quadriga.client import async_client, types
from quadriga.sampling.params import SamplingParams
from quadriga.sampling.pooling import Pooling

# Prompts of one call that are in the server at one time; the next ones follow as they end.
MAX_AT_ONCE = 64


def cut_to(truncate_prompt_tokens: int | None) -> int | None:
    """Return the number of tokens to which texts are cut; None: the context. Raise ApiError."""
    if truncate_prompt_tokens is None or truncate_prompt_tokens == -1:
        return None
    if truncate_prompt_tokens < 1:
        raise invalid(
            f"truncate_prompt_tokens is {truncate_prompt_tokens}: it must be at least 1, or -1 for"
            " the context",
            "truncate_prompt_tokens",
        )
    return truncate_prompt_tokens


async def vectors(
    gateway: Gateway,
    model: ServedModel,
    call: Call,
    answer_id: str,
    asked: Sequence[tuple[types.Prompt, Pooling]],
    options: async_client.RequestOptions,
    names: Mapping[str, str],
) -> list[types.Completion]:
    """Return the completions of prompts, which have their vectors, in order.

    Args:
        gateway: its state.
        model: makes the vectors.
        call: what is answered.
        answer_id: id of the answer.
        asked: the prompts, and what vector is wanted of each.
        options: of each request to the server.
        names: the call's name of each field of the server's requests, for errors.

    Raises:
        ApiError: the server refuses one of the prompts.
    """
    ended: dict[int, types.Completion] = {}
    waiting = iter(asked)
    with gateway.open_group(model, answer_id, names, call.record) as group:
        for prompt, pooling in itertools.islice(waiting, MAX_AT_ONCE):
            group.submit(prompt, SamplingParams(pooling=pooling), False, options)
        while len(ended) < len(asked):
            for number, chunk in await group.next_chunks():
                if chunk.completion is None:
                    continue
                ended[number] = chunk.completion
                group.note(chunk.completion)
                for prompt, pooling in itertools.islice(waiting, 1):
                    group.submit(prompt, SamplingParams(pooling=pooling), False, options)
    return [ended[number] for number in range(len(asked))]
