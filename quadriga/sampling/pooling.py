"""Numbers in place of tokens: a vector of a text, its scores, or probabilities of tokens.

First what a request asks for, then the checks.
"""

import msgspec

from quadriga.errors import InvalidRequest

# How the hidden states of a text become one vector.
LAST, MEAN, WEIGHTED_MEAN, CLS = "last", "mean", "weighted-mean", "cls"
POOLINGS = (LAST, MEAN, WEIGHTED_MEAN, CLS)
# Not of hidden states: the log-probabilities of tokens.
LOGPROBS = "logprobs"
# Not either: the scores of a model that classifies or ranks. SCORE: of one that has a single score.
CLASSIFY, SCORE = "classify", "score"
SCORINGS = (CLASSIFY, SCORE)
# What scores are made of logits; "": as the model says.
IDENTITY, SIGMOID, SOFTMAX, PROBABILITIES = "identity", "sigmoid", "softmax", "probabilities"
ACTIVATIONS = (IDENTITY, SIGMOID, SOFTMAX, PROBABILITIES)
# What a model does that makes no text.
EMBED, RANK, LABEL = "embed", "rank", "label"
MAX_SCORED_TOKENS = 4096  # of one request
MAX_LAST_TOKENS = 256
# These read the hidden states of all tokens, so that no part of the text may come from the cache.
READS_ALL_TOKENS = (MEAN, WEIGHTED_MEAN, CLS)


class Pooling(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Ask for one vector of the prompt; no token is sampled. A map on the wire.

    Attributes:
        method: one of POOLINGS; "": the server's --pooling. LOGPROBS: the vector has natural
            logarithms of probabilities, of `token_ids` or of the last tokens of the prompt.
            CLASSIFY: it has the scores of a model that classifies or ranks. SCORE: the same, of a
            model with a single score.
        normalize: divide the vector by its Euclidean length.
        dimensions: keep only the first of its numbers, before it is normalized; None: all.
        max_tokens: number of tokens to which a text that may be cut is cut; None: the context.
        token_ids: with LOGPROBS, ids that may follow the prompt, whose probabilities are wanted.
        num_last: with LOGPROBS, number of tokens at the end of the prompt whose probabilities are
            wanted, each after those before it; 0: those of `token_ids`.
        with_largest: with LOGPROBS, behind them comes the largest log-probability of any token: one
            number with `token_ids`, and one for each of the last tokens with `num_last`.
        whole: set by the server: every token sees the whole text, which goes into one step.
        activation: of scores, one of ACTIVATIONS, which makes them of the model's logits;
            PROBABILITIES: SIGMOID or SOFTMAX, as fits the model's labels. "": as the model says.
        text_pair: of scores, the second text of a pair whose first text is the prompt; None: there
            is one text.
        max_first_tokens, max_second_tokens: numbers of tokens to which the texts of a pair are cut;
            None: the context.
        instruction: what makes a pair match, for a model that is instructed; "": its own.
        prompt_name: of a vector, the model's prompt that is put before the text; None: its default
            one, if it has one; "": none.
        num_first: set by the server: number of tokens before those of the second type; 0: all are
            of the first type.
    """

    method: str = ""
    normalize: bool = True
    dimensions: int | None = None
    max_tokens: int | None = None
    token_ids: list[int] = []
    num_last: int = 0
    whole: bool = False
    activation: str = ""
    text_pair: str | None = None
    max_first_tokens: int | None = None
    max_second_tokens: int | None = None
    instruction: str = ""
    num_first: int = 0
    prompt_name: str | None = None
    with_largest: bool = False

    @property
    def num_read(self) -> int | None:
        """Number of tokens at the end that one step has to compute; None: all of them."""
        if self.whole or self.method in READS_ALL_TOKENS:
            return None
        return 1 + self.num_last


def filled_pooling(
    pooling: Pooling, server_method: str, vector_size: int, vocab_size: int
) -> Pooling:
    """Return a pooling with its method filled in.

    Args:
        pooling: as a client has sent it.
        server_method: the server's --pooling; "": it gives no vectors.
        vector_size: number of elements of a vector.
        vocab_size: number of the model's ids.

    Raises:
        InvalidRequest: the server gives no vectors, there is no such method, or `dimensions` is
            out of range.
    """
    if pooling.method == LOGPROBS:
        _check_scored(pooling, vocab_size)
        return pooling
    if pooling.text_pair is not None:
        raise InvalidRequest(
            f"text_pair is given with the method {(pooling.method or server_method)!r}: pairs of"
            f" texts are scored by the method {SCORE}",
            "text_pair",
        )
    if not server_method:
        raise InvalidRequest(
            "this server gives no embeddings: start it with --pooling, such as --pooling last",
            "pooling",
        )
    method = pooling.method or server_method
    if method not in POOLINGS:
        raise InvalidRequest(
            f"pooling is {method!r}: it must be one of {', '.join(POOLINGS)}", "pooling"
        )
    if pooling.dimensions is not None and not 1 <= pooling.dimensions <= vector_size:
        raise InvalidRequest(
            f"dimensions is {pooling.dimensions}: vectors of this model have {vector_size}"
            f" elements; ask for 1 to {vector_size}, or leave it out",
            "dimensions",
        )
    if pooling.max_tokens is not None and pooling.max_tokens < 1:
        raise InvalidRequest(
            f"max_tokens is {pooling.max_tokens}: a text is cut to at least 1 token", "max_tokens"
        )
    return msgspec.structs.replace(pooling, method=method)


def check_scoring(pooling: Pooling) -> None:
    """Raise InvalidRequest for scores that cannot be given."""
    if pooling.activation and pooling.activation not in ACTIVATIONS:
        raise InvalidRequest(
            f"activation is {pooling.activation!r}: it must be one of {', '.join(ACTIVATIONS)}",
            "activation",
        )
    for name in ("max_tokens", "max_first_tokens", "max_second_tokens"):
        if (most := getattr(pooling, name)) is not None and most < 1:
            raise InvalidRequest(f"{name} is {most}: a text is cut to at least 1 token", name)


def _check_scored(pooling: Pooling, vocab_size: int) -> None:
    """Raise InvalidRequest for tokens whose probabilities cannot be given."""
    count, last = len(pooling.token_ids), pooling.num_last
    if (count == 0) == (last == 0):
        raise InvalidRequest(
            "give either token_ids or num_last, with the method logprobs", "token_ids"
        )
    if count > MAX_SCORED_TOKENS:
        raise InvalidRequest(
            f"token_ids has {count} ids: at most {MAX_SCORED_TOKENS} are scored; leave some out",
            "token_ids",
        )
    if not 0 <= last <= MAX_LAST_TOKENS:
        raise InvalidRequest(
            f"num_last is {last}: 1 to {MAX_LAST_TOKENS} tokens are scored", "num_last"
        )
    wrong = [token for token in pooling.token_ids if not 0 <= token < vocab_size]
    if wrong:
        raise InvalidRequest(
            f"token_ids holds {wrong[0]}: ids of this model are 0 to {vocab_size - 1}", "token_ids"
        )
