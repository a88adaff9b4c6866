"""Models that score a text or a pair of texts, without torch.

First the heads of `…ForSequenceClassification`, then models that make text and score by the logits
of their next token, then the names of scores and how they become probabilities.
"""

from dataclasses import dataclass
from typing import Any

from quadriga.errors import ModelError
from quadriga.sampling.pooling import CLS, IDENTITY, MEAN, SIGMOID, SOFTMAX
from quadriga.server.models.families.config_values import require, setting

HEAD_CLASS = "ForSequenceClassification"
MULTI_LABEL = "multi_label_classification"
MAX_LABELS = 65_536
# The key of vLLM for the texts of two tokens that say that a pair does not match, and that it does.
TOKENS_KEY = "classifier_from_token"
# A part of the names of the models whose first published files do not say that they score.
QWEN3_RERANKER = "qwen3-reranker"
RELEVANT = "relevant"
# Activations of sentence-transformers, by the last part of their name.
_ACTIVATIONS = {"Identity": IDENTITY, "Sigmoid": SIGMOID, "Softmax": SOFTMAX}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """A head: a layer with an activation over a text's hidden state, then the scores.

    Attributes:
        dense: name of the layer's tensors.
        dense_bias: the layer has a bias.
        activation: of the layer, "tanh", "relu" or "gelu".
        norm: name of the tensors of a norm after the activation, whose other values are those of
            the model's norms; "": there is none.
        out: name of the tensors that make the scores.
        pooling: the hidden state is that of the first token (CLS), or the mean of all (MEAN).
        num_labels: number of scores.
    """

    dense: str
    dense_bias: bool = True
    activation: str
    norm: str = ""
    out: str
    pooling: str = CLS
    num_labels: int


# By model_type.
_HEADS: dict[str, dict[str, Any]] = {
    "bert": {"dense": "pooler.dense", "activation": "tanh", "out": "classifier"},
    "distilbert": {"dense": "pre_classifier", "activation": "relu", "out": "classifier"},
    "roberta": {"dense": "classifier.dense", "activation": "tanh", "out": "classifier.out_proj"},
}
_HEADS["mpnet"] = _HEADS["xlm-roberta"] = _HEADS["roberta"]
_HEADS["modernbert"] = {"dense": "head.dense", "norm": "head.norm", "out": "classifier"}


def has_head(config: dict[str, Any]) -> bool:
    """Return whether a config.json is that of a model that classifies or ranks."""
    names = config.get("architectures") or []
    return any(str(name).endswith(HEAD_CLASS) for name in names)


def read_head(config: dict[str, Any]) -> HeadConfig | None:
    """Return the head of a config.json; None if the model has none. Raise ModelError."""
    if not has_head(config) or TOKENS_KEY in config:
        return None
    known = _HEADS.get(str(config.get("model_type")))
    if known is None:
        raise ModelError(
            f"config.json names {config['architectures'][0]}; heads are served of the model types "
            + ", ".join(sorted(_HEADS))
        )
    if "norm" in known:
        known = known | _modernbert_values(config)
    return HeadConfig(**known, num_labels=len(_labels(config)))


def _modernbert_values(config: dict[str, Any]) -> dict[str, Any]:
    """Return what config.json says of a ModernBERT's head. Raise ModelError."""
    require(config, "classifier_pooling", (CLS, MEAN, None))
    require(config, "classifier_activation", ("gelu", "relu", None))
    return {
        "dense_bias": setting(config, "classifier_bias", False),
        "activation": setting(config, "classifier_activation", "gelu"),
        "pooling": setting(config, "classifier_pooling", CLS),
    }


@dataclass(frozen=True, slots=True)
class LogitScore:
    """How a model that makes text scores a pair: by the logits of the token after its prompt.

    Attributes:
        true: id or text of the token that says that the texts match, such as "yes".
        false: of the token that says that they do not; its logit is subtracted. None: none is.
        instruction: what makes a pair match, if a request does not say; "": as the template says.
    """

    true: int | str
    false: int | str | None
    instruction: str = ""


def read_logit_score(config: dict[str, Any], name: str) -> LogitScore | None:
    """Return how a model scores that makes text; None if it does not.

    Args:
        config: config.json.
        name: the model's name or path.

    Raises:
        ModelError: the tokens of config.json are not two texts.
    """
    tokens = config.get(TOKENS_KEY)
    if tokens is None:
        known = config.get("model_type") == "qwen3" and QWEN3_RERANKER in name.lower()
        return LogitScore("yes", "no") if known else None
    if not isinstance(tokens, list) or [type(token) for token in tokens] != [str, str]:
        raise ModelError(
            f"the model's config.json has {TOKENS_KEY} = {tokens!r}; it should be the texts of two"
            " tokens, such as no and yes"
        )
    return LogitScore(tokens[1], tokens[0])


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of a model, in order.

    Attributes:
        labels: their names.
        activation: what makes them of logits, if a request does not say it: IDENTITY, SIGMOID or
            SOFTMAX.
        probabilities: what makes probabilities of them, SIGMOID or SOFTMAX.
        logit_score: how a model that makes text scores; None: the model has a head.
    """

    labels: list[str]
    activation: str
    probabilities: str
    logit_score: LogitScore | None = None


def read_scores(
    config: dict[str, Any], named_activation: str, logit_score: LogitScore | None
) -> Scores:
    """Return the scores of a model with a head, or of one that makes text and scores.

    Args:
        config: config.json.
        named_activation: of config_sentence_transformers.json; "": it names none.
        logit_score: how a model that makes text scores; None: the model has a head.

    Raises:
        ModelError: its labels or its activation are not supported.
    """
    if logit_score is not None:
        activation = activation_of_scores(named_activation) or SIGMOID
        return Scores([RELEVANT], activation, SIGMOID, logit_score)
    labels = _labels(config)
    is_multi = len(labels) == 1 or config.get("problem_type") == MULTI_LABEL
    probabilities = SIGMOID if is_multi else SOFTMAX
    own = config.get("sentence_transformers")
    name = (
        (own.get("activation_fn") if isinstance(own, dict) else None)
        or config.get("sbert_ce_default_activation_function")
        or named_activation
    )
    return Scores(labels, activation_of_scores(name) or probabilities, probabilities)


def activation_of_scores(name: object) -> str:
    """Return our name of an activation of sentence-transformers; "" if there is none.

    Raises:
        ModelError: it is not supported.
    """
    if not name:
        return ""
    kind = str(name).rpartition(".")[2]
    if kind not in _ACTIVATIONS:
        raise ModelError(
            f"the model's activation of scores is {str(name)[:100]!r}; supported: "
            + ", ".join(_ACTIVATIONS)
        )
    return _ACTIVATIONS[kind]


def _labels(config: dict[str, Any]) -> list[str]:
    """Return the names of the scores, of id2label or else of num_labels. Raise ModelError."""
    named = config.get("id2label")
    if isinstance(named, dict) and named:
        numbers = {str(number): str(name) for number, name in named.items()}
        places = [str(number) for number in range(len(numbers))]
        if numbers.keys() != set(places):
            raise ModelError(
                f"the model's config.json has {len(numbers)} labels in id2label, and not one for"
                f" each number from 0 to {len(numbers) - 1}"
            )
        return [numbers[place] for place in places]
    count = config.get("num_labels", 2)  # transformers' default
    if not isinstance(count, int) or not 1 <= count <= MAX_LABELS:
        raise ModelError(
            f"the model's config.json has num_labels = {count!r}; supported: 1 to {MAX_LABELS}"
        )
    return [f"LABEL_{number}" for number in range(count)]
