"""The sampling parameters of a request as the worker's slot needs them."""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from quadriga.sampling.limits import MAX_SEED
from quadriga.sampling.params import NEUTRAL, SamplingParams, given
from quadriga.wire.messages.arrays import pack_floats, pack_ids
from quadriga.wire.messages.grammar import GrammarForm
from quadriga.wire.messages.worker import SlotSamplingParams, WantedLogprobs

MAX_JUMP_GRAMMAR_CHARS = 32_768  # the library takes 28 ms to find 30,000 forced characters


@dataclass(frozen=True, slots=True)
class ResolvedSampling:
    """SamplingParams of one choice, with a value for everything that a step needs.

    Attributes:
        params: everything else, as the client has sent it.
    """

    params: SamplingParams
    max_new_tokens: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float

    @classmethod
    def of_choice(cls, params: SamplingParams, index: int) -> "ResolvedSampling":
        """Return the parameters of choice `index` of `params.n`.

        Each choice has a seed of its own, and only the first one returns prompt logprobs.

        Raises:
            ValueError: max_new_tokens or seed, which the frontend fills in, is missing.
        """
        max_new_tokens, seed = params.max_new_tokens, params.seed
        if max_new_tokens is None or seed is None:
            raise ValueError("max_new_tokens or seed is missing")
        if index and params.prompt_logprobs is not None:
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        return cls(
            params=params,
            max_new_tokens=max_new_tokens,
            seed=(seed + index) % (MAX_SEED + 1),
            temperature=given(params.temperature, NEUTRAL.temperature),
            top_k=given(params.top_k, NEUTRAL.top_k),
            top_p=given(params.top_p, NEUTRAL.top_p),
            min_p=given(params.min_p, NEUTRAL.min_p),
            repetition_penalty=given(params.repetition_penalty, NEUTRAL.repetition_penalty),
        )


def slot_sampling_params(
    sampling: ResolvedSampling,
    num_prompt: int,
    stop_ids: Iterable[int],
    bad_words: list[bytes],
    grammar: GrammarForm | None,
) -> SlotSamplingParams | None:
    """Return what a slot needs beyond temperature, top_k, top_p and seed; None for nothing.

    Args:
        sampling: parameters of the choice.
        num_prompt: number of prompt tokens.
        stop_ids: every token id that ends the request.
        bad_words: token ids (int32 bytes) of each.
        grammar: what the text must match.
    """
    params = sampling.params
    masks_stops = params.min_new_tokens > 0 or grammar is not None
    slot_params = SlotSamplingParams(
        num_prompt=0,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        bias_ids=pack_ids(params.logit_bias),
        bias=pack_floats(params.logit_bias.values()),
        allowed_ids=pack_ids(params.allowed_token_ids or ()),
        bad_words=bad_words,
        min_new_tokens=params.min_new_tokens,
        stop_ids=pack_ids(sorted(stop_ids)) if masks_stops else b"",
        logprobs=_wanted_logprobs(params),
        prompt_logprobs=params.prompt_logprobs,
        grammar=grammar.key if grammar is not None else b"",
        jumps=grammar is not None and _allows_jump_forward(params, grammar),
    )
    if slot_params == _DEFAULTS:
        return None
    return msgspec.structs.replace(slot_params, num_prompt=num_prompt)


def _wanted_logprobs(params: SamplingParams) -> int | WantedLogprobs | None:
    if not params.logprob_token_ids:
        return params.logprobs
    return WantedLogprobs(params.logprobs or 0, pack_ids(params.logprob_token_ids))


def _allows_jump_forward(params: SamplingParams, grammar: GrammarForm) -> bool:
    """Return whether forced tokens equal the tokens that would be sampled, and need no logprobs.

    A grammar that could force a very long text is left out: looking for it takes long.
    """
    masked = params.logit_bias or params.allowed_token_ids is not None or params.bad_words
    too_long = len(grammar.text) > MAX_JUMP_GRAMMAR_CHARS
    return not (masked or params.num_top_logprobs is not None or too_long)


_DEFAULTS = SlotSamplingParams(num_prompt=0)
