"""What the worker must know of how a request's tokens are chosen."""

from collections.abc import Iterable

import msgspec

from quadriga.sampling.limits import MAX_SEED
from quadriga.sampling.params import NEUTRAL, SamplingParams, given
from quadriga.wire.messages.arrays import pack_floats, pack_ids
from quadriga.wire.messages.grammar import GrammarForm
from quadriga.wire.messages.worker import SlotSamplingParams

MAX_JUMP_GRAMMAR_CHARS = 32_768
"""Characters of a grammar. To find 30,000 that are forced takes the library 28 ms."""


def choice_params(params: SamplingParams, index: int) -> SamplingParams:
    """Of one of `n` choices: each has a seed of its own, and the first one alone tells the
    log-probabilities of the prompt."""
    if index == 0:
        return params
    assert params.seed is not None, "the front door fills it in"
    seed = (params.seed + index) % (MAX_SEED + 1)
    return msgspec.structs.replace(params, seed=seed, prompt_logprobs=None)


def slot_sampling_params(
    params: SamplingParams,
    num_prompt: int,
    stop_ids: Iterable[int],
    bad_words: list[bytes],
    grammar: GrammarForm | None = None,
) -> SlotSamplingParams | None:
    """None where temperature, top_k, top_p and seed say all. stop_ids: all that end the request;
    bad_words: the token ids of each."""
    bars_stops = params.min_new_tokens > 0 or grammar is not None
    rules = SlotSamplingParams(
        num_prompt=0,
        min_p=given(params.min_p, NEUTRAL.min_p),
        repetition_penalty=given(params.repetition_penalty, NEUTRAL.repetition_penalty),
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        bias_ids=pack_ids(params.logit_bias),
        bias=pack_floats(params.logit_bias.values()),
        allowed_ids=pack_ids(params.allowed_token_ids or ()),
        bad_words=bad_words,
        min_new_tokens=params.min_new_tokens,
        stop_ids=pack_ids(sorted(stop_ids)) if bars_stops else b"",
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        grammar=grammar.key if grammar is not None else b"",
        jumps=grammar is not None and _may_jump(params, grammar),
    )
    if rules == _NO_RULES:
        return None
    return msgspec.structs.replace(rules, num_prompt=num_prompt)


def _may_jump(params: SamplingParams, grammar: GrammarForm) -> bool:
    """Whether forced tokens are what would have been chosen, and nobody wants to know more of
    them. Where a grammar could force a very long text, to look for it takes long."""
    barred = params.logit_bias or params.allowed_token_ids is not None or params.bad_words
    told = params.logprobs is not None
    return not (barred or told or len(grammar.text) > MAX_JUMP_GRAMMAR_CHARS)


_NO_RULES = SlotSamplingParams(num_prompt=0)
