"""SamplingParams: how tokens are sampled, when generation stops, and which logprobs come back.

First the ranges of all request parameters in one table, then the checks where a program makes
SamplingParams, then the class. validation.py checks the values of a request.
"""

import json
import secrets
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
from msgspec import StructMeta

from quadriga.errors import InvalidRequest
from quadriga.keywords import check_keywords
from quadriga.sampling.pooling import Pooling

# validation.py checks requests against `LIMITS`, the gateway's OpenAPI document is made from it,
# and a test compares the range column of docs/sampling.md with it.

MAX_SEED = 2**63 - 1
MAX_CHOICES = 128
MAX_GRAMMAR_CHARS = 128 * 1024


class Range(NamedTuple):
    """Bounds of one parameter, inclusive.

    Attributes:
        minimum: smallest number, or smallest value of a map.
        maximum: largest number, or largest value of a map.
        excludes_minimum: True if `minimum` itself is out of range.
        note: what an error adds about special values.
        min_items: smallest number of items of a list or a map.
        max_items: largest number of items of a list or a map.
        items: noun for the items.
        max_chars: largest number of characters of a text, or of each text of a list.
    """

    minimum: float | None = None
    maximum: float | None = None
    excludes_minimum: bool = False
    note: str = ""
    min_items: int = 0
    max_items: int | None = None
    items: str = ""
    max_chars: int | None = None

    def contains(self, number: float) -> bool:
        """Return whether a number is within the bounds; NaN never is."""
        assert self.minimum is not None
        if self.excludes_minimum and number == self.minimum:
            return False
        return self.minimum <= number <= (float("inf") if self.maximum is None else self.maximum)

    @property
    def rule(self) -> str:
        """The rule that a number must obey, for an error message."""
        if self.maximum is None:
            return f"must be at least {self.minimum}{self.note}"
        if self.excludes_minimum:
            return f"must be in ({self.minimum}, {self.maximum}]{self.note}"
        return f"must be from {self.minimum} to {self.maximum}{self.note}"


_PENALTY = Range(-2, 2, note="; 0 is off")
_LOGPROBS = Range(0, 20)
_GRAMMAR = Range(max_chars=MAX_GRAMMAR_CHARS)
_MARK = Range(max_chars=64)

LIMITS = {
    "max_new_tokens": Range(1),
    "min_new_tokens": Range(0),
    # Above this temperature, and below the smallest repetition penalty, float32 logits overflow.
    "temperature": Range(0, 1_000_000, note="; 0 is greedy"),
    "top_k": Range(-1, 2**31 - 1, note="; -1 and 0 are off"),
    "top_p": Range(0, 1, excludes_minimum=True, note="; 1 is off"),
    "min_p": Range(0, 1, note="; 0 is off"),
    "repetition_penalty": Range(0.001, 2, note="; 1 is off"),
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
    "seed": Range(0, MAX_SEED),
    "n": Range(1, MAX_CHOICES),
    "logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
    "priority": Range(-1000, 1000),
    "ttft_target": Range(0, 604_800, excludes_minimum=True, note=" seconds"),
    "logit_bias": Range(-100, 100, max_items=1024, items="ids"),
    "stop": Range(max_items=16, items="strings", max_chars=256),
    "stop_regex": Range(max_items=4, items="strings", max_chars=256),
    "bad_words": Range(max_items=128, items="strings", max_chars=64),
    "stop_token_ids": Range(max_items=256, items="ids"),
    "allowed_token_ids": Range(min_items=1),
    "json_schema": _GRAMMAR,
    "regex": _GRAMMAR,
    "ebnf": _GRAMMAR,
    "choice": Range(min_items=1, max_chars=MAX_GRAMMAR_CHARS),
    "structural_tag": _GRAMMAR,
    "thinking_token_budget": Range(0),
    "thinking_end": _MARK,
    "thinking_start": _MARK,
    "logprob_token_ids": Range(max_items=128, items="ids"),
}


# Messages on the wire are decoded without these checks; the decoder has its own.

MAX_TOKENS_ALIAS = "max_tokens"

T = TypeVar("T")


class CheckedConstruction(StructMeta):
    """Metaclass of SamplingParams: calling the class checks its keyword arguments."""

    def __call__(cls: type[T], *values: Any, **fields: Any) -> Any:  # noqa: N805 - a metaclass
        """Make an instance.

        Raises:
            TypeError: a keyword is not the name of a field.
            InvalidRequest: a value has the wrong type, or the two names of one field differ.
        """
        if values:
            raise TypeError(
                f"{cls.__name__}() takes keywords only: {cls.__name__}(max_tokens=64, …)"
            )
        names = cls.__struct_fields__  # type: ignore[attr-defined]
        check_keywords(cls.__name__, fields, (*names, MAX_TOKENS_ALIAS))
        try:
            return msgspec.convert(_without_alias(fields), cls)
        except msgspec.ValidationError:
            raise _wrong_type(cls, fields) from None


def _without_alias(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with max_new_tokens in place of max_tokens."""
    if MAX_TOKENS_ALIAS not in fields:
        return fields
    fields = dict(fields)
    alias = fields.pop(MAX_TOKENS_ALIAS)
    if alias is None:
        return fields
    if fields.get("max_new_tokens") not in (None, alias):
        raise InvalidRequest(
            f"max_tokens is {alias} and max_new_tokens is {fields['max_new_tokens']}: they are two"
            " names of one limit; give one of them",
            MAX_TOKENS_ALIAS,
        )
    return fields | {"max_new_tokens": alias}


def _wrong_type(cls: type, fields: dict[str, Any]) -> InvalidRequest:
    """Return the error for the first field whose value has the wrong type."""
    types = {field.name: field.type for field in msgspec.structs.fields(cls)}
    types[MAX_TOKENS_ALIAS] = types["max_new_tokens"]
    for name, value in fields.items():
        try:
            msgspec.convert(value, types[name])
        except msgspec.ValidationError as error:
            reason = str(error).replace("`", "").replace("null", "None").replace(" | ", " or ")
            reason = reason[0].lower() + reason[1:].replace(" - at $", ", at ")
            return InvalidRequest(f"{name} is {value!r}: {reason}", name)
    raise AssertionError("msgspec refused the fields together, but accepts each of them")


# docs/sampling.md has the table of all parameters, with those of other servers.

GREEDY_BELOW_TEMPERATURE = 1e-5
# The fields that hold a grammar; a request may give one of them at most.
GRAMMAR_FIELDS = ("json_schema", "regex", "ebnf", "choice", "structural_tag")


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Values for the parameters that a request leaves open.

    The defaults of this class are OpenAI's; they leave the model's distribution unchanged.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


NEUTRAL = SamplingDefaults()


class SamplingParams(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    metaclass=CheckedConstruction,
):
    """Sampling and stopping of one request: a map on the wire, whose absent fields are defaults.

    Attributes of sampling. None takes the server's default (--sampling-defaults), which is the
    value in the model's generation_config.json, or else the one in parentheses:

        temperature: 0 to 1e6 (1); below 1e-5 sampling is greedy.
        top_k: sample from the k likeliest tokens; -1 and 0 are off (-1).
        top_p: sample from the smallest set of tokens whose probability reaches top_p, in (0, 1]
            (1).
        min_p: drop tokens less than min_p times as likely as the likeliest, in [0, 1] (0).
        repetition_penalty: divides the positive and multiplies the negative logits of every token
            in the prompt and in the output, in [0.001, 2] (1).
        frequency_penalty: is subtracted from a token's logit once per occurrence in the output,
            in [-2, 2].
        presence_penalty: is subtracted once from the logit of every token in the output, in
            [-2, 2].
        logit_bias: is added to the logits of these ids, each in [-100, 100].
        allowed_token_ids: restricts sampling to these ids. None: no restriction.
        bad_words: texts that are not generated: the last token of a text is masked wherever its
            other tokens precede.
        seed: the same seed, prompt and parameters give the same tokens; 0 <= seed < 2^63.
            None: drawn at random. Choice i of `n` has the seed plus i.

    Attributes of stopping:

        max_new_tokens: largest number of generated tokens (>= 1). None: the server's
            --default-max-tokens, or what the model's context leaves if that is less.
        max_tokens: the same, by OpenAI's and vLLM's name; give one of the two.
        min_new_tokens: number of generated tokens before which stop tokens are masked and stop
            strings are not searched for.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: ids that end generation, beside the model's own end-of-text ids.
        stop_regex: regular expressions that end the text as stop strings do, at the first
            character that completes a match; a match has at most 256 characters.
        include_stop_str_in_output: keep the stop string or stop token's text at the end.
        no_stop_trim: the same, by SGLang's name.
        ignore_eos: the model's own end-of-text ids do not stop; stop_token_ids still do.

    Attributes of structured output. At most one; a stop token is allowed only where the text may
    end:

        json_schema: JSON of this schema, which is JSON text or a map.
        regex: a match of this regular expression, in the dialect of Rust's regex crate.
        ebnf: a sentence of this grammar, in the notation of llama.cpp's GBNF or of Lark.
        choice: one of these texts.
        structural_tag: a text of several parts, {"format": …}, or free text in which structures
            follow triggers, {"structures": [{"begin", "schema", "end"}], "triggers": […]}: JSON
            text or a map.

    Attributes of reasoning, for models that write it at the beginning of an answer. A grammar
    applies after it:

        thinking_token_budget: number of reasoning tokens after which `thinking_end` is written by
            force, and the answer goes on. None: no limit.
        thinking_end: text that ends the reasoning; "": the answer has none. Whitespace at its ends
            is written by force, but the model need not write it.
        thinking_start: text that begins the reasoning, at the end of the prompt or at the
            beginning of the answer; "": the prompt ends within the reasoning.

    Attributes of the answer:

        skip_special_tokens: leave special tokens out of the text.
        n: number of choices, each with an index; their prompt is computed once.
        logprobs: number of the likeliest tokens, 0 to 20, whose log-probabilities come with each
            generated token and its own. They are those of the model's own distribution, before
            the parameters above change it. None: no logprobs.
        prompt_logprobs: the same for the prompt's tokens.
        logprob_token_ids: ids whose log-probabilities come with each generated token, after the
            likeliest ones. They imply `logprobs` 0.
        ttft_target: seconds from the arrival within which the first token is wanted. Requests of
            one priority are admitted by it, and one whose target cannot be met is refused. None:
            as soon as possible, after those with a target of less than 5 s.
        text_lengths: a streamed chunk says how many characters each of its tokens adds to the
            text, so that a replay can be cut where the chunks before it were.
        continues_prompt: the text goes on where the prompt's ends, so that its first space is kept;
            False: it is a text of its own, whose first space SentencePiece's decoder strips. None:
            False for the new turn of a chat that may begin with free text, else True.
        first_token_ids: ids with which the answer begins. They are given, not sampled, and the
            answer goes on after them as if it had sampled them: they are part of its text, its
            token ids and its usage, and count for max_new_tokens, penalties, grammars and stops.
            They have no log-probabilities. Fewer than max_new_tokens.
        pooling: the answer is one vector of the prompt in place of tokens; the other parameters
            have no effect. None: it is tokens.
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
    thinking_token_budget: int | None = None
    thinking_end: str = ""
    thinking_start: str = ""
    logprob_token_ids: list[int] = msgspec.field(default_factory=list)
    text_lengths: bool = False
    ttft_target: float | None = None
    continues_prompt: bool | None = None
    pooling: Pooling | None = None
    first_token_ids: list[int] = msgspec.field(default_factory=list)
    if TYPE_CHECKING:
        max_tokens: int | None = None
    else:

        @property
        def max_tokens(self) -> int | None:
            """`max_new_tokens`; on the wire there is one name only."""
            return self.max_new_tokens

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return _as_list(self.stop)

    @property
    def stop_regexes(self) -> list[str]:
        """`stop_regex` as a list."""
        return _as_list(self.stop_regex)

    @property
    def keeps_stop(self) -> bool:
        """Whether the stop string stays in the text."""
        return self.include_stop_str_in_output or self.no_stop_trim

    def filled(self, defaults: SamplingDefaults) -> "SamplingParams":
        """Return a copy in which `defaults` replace None."""
        left_open = {
            name: getattr(defaults, name)
            for name in defaults.__struct_fields__
            if getattr(self, name) is None
        }
        return msgspec.structs.replace(self, **left_open) if left_open else self

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of log-probabilities beside that of each token; None: no log-probabilities."""
        if self.logprobs is None and not self.logprob_token_ids:
            return None
        return (self.logprobs or 0) + len(self.logprob_token_ids)

    def with_seed(self) -> "SamplingParams":
        """Return a copy with a seed, so that a request that is sent again gives the same tokens."""
        if self.seed is not None:
            return self
        return msgspec.structs.replace(self, seed=secrets.randbelow(MAX_SEED))


class Grammar(NamedTuple):
    """A grammar as a client gives it.

    Attributes:
        kind: one of GRAMMAR_FIELDS.
        text: the grammar; JSON for a schema and for choices.
    """

    kind: str
    text: str


def grammar_of(params: SamplingParams) -> Grammar | None:
    """Return the grammar that a request asks for.

    Raises:
        InvalidRequest: a schema cannot be written as JSON.
    """
    for kind in GRAMMAR_FIELDS:
        value = getattr(params, kind)
        if value is not None:
            return Grammar(kind, value if isinstance(value, str) else _as_json(kind, value))
    return None


def without_grammar(params: SamplingParams) -> SamplingParams:
    """Return a copy without the grammar."""
    return msgspec.structs.replace(params, **dict.fromkeys(GRAMMAR_FIELDS))


def given(value: T | None, neutral: T) -> T:
    """Return a value, or the neutral one if it is None."""
    return neutral if value is None else value


def _as_json(kind: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{kind} cannot be written as JSON: {error}", kind) from None


def _as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value
