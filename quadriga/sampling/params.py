"""SamplingParams: how tokens are chosen, when to stop, and what is told about them.

docs/sampling.md has the table of all of them, with who else has them and how. Their ranges are
held by `quadriga/sampling/validation.py`.
"""

import secrets
from typing import Any, TypeVar

import msgspec

from quadriga.sampling.validation import MAX_SEED as MAX_SEED
from quadriga.sampling.validation import check_params

DEFAULT_MAX_NEW_TOKENS = 128
GREEDY_BELOW_TEMPERATURE = 1e-5

T = TypeVar("T")


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a request has that leaves these open. The values here are OpenAI's, and change
    nothing about the model's own distribution."""

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


NEUTRAL = SamplingDefaults()


class SamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Sampling and stopping of one request. On the wire a map; absent fields take the defaults.

    How a token is chosen. None: as the server was started (--sampling-defaults), which is the
    model's own generation_config.json or else the value in parentheses.

    temperature: 0 (below 1e-5) is greedy; at most 1e6 (1).
    top_k: sample from the k likeliest tokens; -1 or 0 is off (-1).
    top_p: sample from the smallest set of tokens whose probability reaches top_p, in (0, 1] (1).
    min_p: drop tokens less than min_p times as likely as the likeliest, in [0, 1] (0).
    repetition_penalty: divides the positive and multiplies the negative logits of every token
        that is in the prompt or was generated, in [0.001, 2] (1).
    frequency_penalty: taken from a token's logit for each time it was generated, in [-2, 2].
    presence_penalty: taken once from the logit of every token that was generated, in [-2, 2].
    logit_bias: added to the logits of these ids, each in [-100, 100].
    allowed_token_ids: no other ids are generated. None: all may be.
    bad_words: texts that are not generated: the last token of one is barred where the tokens
        before it stand there already.
    seed: the same seed, prompt and parameters give the same tokens; 0 <= seed < 2^63.
        None: the front door draws one. Choice i of `n` has the seed plus i.

    When it ends.

    max_new_tokens: at most so many tokens are generated (>= 1). None: 128, or as many as the
        model's context leaves, whichever is smaller.
    min_new_tokens: so many tokens are generated before a stop token may be, and before stop
        strings are looked for.
    stop: strings that end the text; they are not part of it.
    stop_token_ids: ids that end the generation, beside the model's own end-of-text ids.
    stop_regex: regular expressions that end the text as stop strings do, at the first character
        that completes a match; a match has at most 256 characters.
    include_stop_str_in_output: what stopped the text is the end of it, a stop token's text too.
    no_stop_trim: the same, by SGLang's name.
    ignore_eos: the model's own end-of-text ids do not stop; stop_token_ids still do.

    What the text must be. One of these at most; a stop token comes only where the text may end.

    json_schema: JSON of this schema, which is JSON text or a map.
    regex: a match of this regular expression, in the dialect of Rust's regex crate.
    ebnf: a sentence of this grammar, in the notation of llama.cpp's GBNF or of Lark.
    choice: one of these texts.
    structural_tag: free text in which structures follow triggers, {"structures": [{"begin",
        "schema", "end"}], "triggers": […]}: JSON text or a map.

    What comes back.

    skip_special_tokens: special tokens leave no text.
    n: so many choices, each with an index; their prompt is computed once.
    logprobs: the log-probability of each generated token and of this many of the likeliest
        ones, 0 to 20, of the model's own distribution, before anything above changes it.
        None: none.
    prompt_logprobs: the same of the prompt's tokens.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = msgspec.field(default_factory=list)
    seed: int | None = None
    stop: str | list[str] = msgspec.field(default_factory=list)
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    stop_regex: str | list[str] = msgspec.field(default_factory=list)
    include_stop_str_in_output: bool = False
    no_stop_trim: bool = False
    ignore_eos: bool = False
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    choice: list[str] | None = None
    structural_tag: str | dict[str, Any] | None = None
    skip_special_tokens: bool = True
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def stop_strings(self) -> list[str]:
        return _as_list(self.stop)

    @property
    def stop_regexes(self) -> list[str]:
        return _as_list(self.stop_regex)

    @property
    def keeps_stop(self) -> bool:
        return self.include_stop_str_in_output or self.no_stop_trim

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidRequest for the first value out of its range."""
        check_params(self, vocab_size)

    def filled(self, defaults: SamplingDefaults = NEUTRAL) -> "SamplingParams":
        """A copy in which nothing is None that `defaults` has."""
        left_open = {
            name: getattr(defaults, name)
            for name in defaults.__struct_fields__
            if getattr(self, name) is None
        }
        return msgspec.structs.replace(self, **left_open) if left_open else self

    def with_seed(self) -> "SamplingParams":
        """A copy with a seed, so that a request that has to be sent again gives the same."""
        if self.seed is not None:
            return self
        return msgspec.structs.replace(self, seed=secrets.randbelow(MAX_SEED))


def given(value: T | None, neutral: T) -> T:
    """A parameter's value, or the neutral one where it was left open."""
    return neutral if value is None else value


def _as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value
