"""Many prompts whose answers are vectors, as the requests of one call."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from http_proc.core.call import Call
from http_proc.core.errors import invalid
from http_proc.core.gateway import Gateway
from http_proc.core.served_model import ServedModel
from quadriga.client import async_client, types
from quadriga.errors import InvalidRequest
from quadriga.sampling.params import SamplingParams
from quadriga.sampling.pooling import CLASSIFY, POOLINGS, SCORE, Pooling

# Prompts of one call that are in the server at one time; the next ones follow as they end.
MAX_AT_ONCE = 64


def embeds(info: Mapping[str, Any]) -> bool:
    """Return whether the info of a model says that it makes vectors of texts."""
    return bool(info.get("embeddings"))


def ranks(info: Mapping[str, Any]) -> bool:
    """Return whether the info of a model says that it scores pairs."""
    return len(_labels_of(info)) == 1


def classifies(info: Mapping[str, Any]) -> bool:
    """Return whether the info of a model says that it has the labels of texts."""
    return bool(_labels_of(info)) and bool(info.get("encoder"))


def _labels_of(info: Mapping[str, Any]) -> Sequence[str]:
    labels: Sequence[str] = (info.get("scores") or {}).get("labels", ())
    return labels


# Methods of Pooling -> who has them, and what the others lack.
_ABILITIES: dict[str, tuple[Callable[[Mapping[str, Any]], bool], str]] = {
    SCORE: (ranks, "scores no pairs"),
    CLASSIFY: (classifies, "has no labels"),
    **dict.fromkeys(("", *POOLINGS), (embeds, "makes no embeddings")),
}


async def check_ability(gateway: Gateway, model: ServedModel, method: str) -> None:
    """Raise ApiError for a model that has no vectors of a method where another one has them.

    Where no model has them, the server refuses the request.
    """
    is_able, lack = _ABILITIES.get(method, (None, ""))
    if len(gateway.models) == 1 or is_able is None:
        return
    if is_able(await model.server_info.static()):
        return
    if names := await gateway.models.names_of(is_able):
        raise invalid(f"{model.name} {lack}: use {' or '.join(map(repr, names))}", "model")


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


def check_count(field: str, count: int, most: int, unit: str) -> None:
    """Raise ApiError for a list of a request that is empty or too long.

    Args:
        field: its name.
        count: number of its entries.
        most: the largest number that a request may have.
        unit: what the entries are, in the plural.
    """
    if not count:
        raise invalid(f"{field} is empty: send 1 to {most} {unit}", field)
    if count > most:
        raise invalid(
            f"{field} has {count} {unit}: a request has at most {most}; send several requests",
            field,
        )


async def vectors(
    gateway: Gateway,
    model: ServedModel,
    call: Call,
    answer_id: str,
    asked: Sequence[tuple[types.Prompt, Pooling]],
    options: async_client.RequestOptions,
    names: Mapping[str, str],
    with_receipts: bool = False,
    texts_field: str = "",
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
        with_receipts: the completions have receipts.
        texts_field: the call's name of the list whose entries are the prompts; "": they are none.

    Raises:
        ApiError: another model is to be asked, or the server refuses one of the prompts.
    """
    if asked:
        await check_ability(gateway, model, asked[0][1].method)
    ended: dict[int, types.Completion] = {}
    waiting = iter(asked)
    with gateway.open_group(model, answer_id, names, call.record) as group:
        group.expect(len(asked))
        for prompt, pooling in itertools.islice(waiting, MAX_AT_ONCE):
            group.submit(prompt, SamplingParams(pooling=pooling), False, options)
        while len(ended) < len(asked):
            try:
                chunks = await group.next_chunks()
            except InvalidRequest as error:
                if texts_field and len(asked) > 1 and group.failed_choice is not None:
                    raise error.of_text(f"{texts_field}[{group.failed_choice}]") from None
                raise
            for number, chunk in chunks:
                if chunk.completion is None:
                    continue
                ended[number] = chunk.completion
                group.note(chunk.completion)
                for prompt, pooling in itertools.islice(waiting, 1):
                    group.submit(prompt, SamplingParams(pooling=pooling), False, options)
        completions = [ended[number] for number in range(len(asked))]
        if with_receipts:
            await group.receipts(completions)
    return completions
