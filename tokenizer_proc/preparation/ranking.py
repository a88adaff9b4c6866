"""Prompts of models that make text and score a pair of texts, such as Qwen3-Reranker."""

from array import array

from quadriga.errors import InvalidRequest, ModelError
from quadriga.sampling.pooling import Pooling
from quadriga.server.models.families.classifier import LogitScore
from quadriga.wire.client import ChatMessage, ChatOptions
from tokenizer_proc.preparation.encode import Encoder

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# The prompt of Qwen3-Reranker (Zhang et al. 2025, https://arxiv.org/abs/2506.05176), for files
# whose chat template has no roles for the texts of a pair.
OWN_FORM_OF = "qwen3"
_BEFORE = (
    "<|im_start|>system\n"
    "Judge whether the Document meets the requirements based on the Query and the Instruct"
    ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_PROBES = "first text", "second text"


class PairPrompts:
    """Writes the prompt of a pair, with the model's chat template if that takes pairs.

    Such a template has the roles "query" and "document", and the instruction as "system".

    Args:
        encoder: encodes texts, and renders chats.
        score: how the model scores.
        model_type: of its config.json.

    Attributes:
        token_ids: of the token that says that a pair matches, and of the other one, if any.

    Raises:
        ModelError: there is no form of a pair, or a text that should be one token is none.
    """

    def __init__(self, encoder: Encoder, score: LogitScore, model_type: str) -> None:
        self._encoder = encoder
        self._instruction = score.instruction
        has_own_form = model_type == OWN_FORM_OF
        # Files that name the ids are those whose template was written for pairs.
        is_for_pairs = isinstance(score.true, int) or not has_own_form
        self._has_template = is_for_pairs and self._takes_pairs()
        if not self._has_template and not has_own_form:
            raise ModelError(
                f"the model ({model_type}) scores pairs of texts, and its chat template shows no"
                " messages of the roles query and document: give one with --chat-template"
            )
        self._after = self._render(*_PROBES, "").rpartition(_PROBES[1])[2]
        named = (score.true,) if score.false is None else (score.true, score.false)
        self.token_ids = [self._id_of(token) for token in named]

    def encode(self, first: str, second: str, pooling: Pooling, limit: int | None) -> "array[int]":
        """Return the ids of a pair's prompt.

        Args:
            first: the first text, such as a query.
            second: the second one, such as a document.
            pooling: the instruction, and the tokens to which each text is cut.
            limit: number of ids, to which the end of the second text is cut, as far as that
                suffices; None: it is not cut.

        Raises:
            InvalidRequest: a text cannot be encoded.
        """
        first = self._cut(first, pooling.max_first_tokens)
        second = self._cut(second, pooling.max_second_tokens)
        text = self._render(first, second, pooling.instruction or self._instruction)
        ids = self._encoder.encode(text, is_chat=True)
        if limit is None or len(ids) <= limit or not text.endswith(self._after):
            return ids
        before = self._encoder.encode(text.removesuffix(self._after), is_chat=True)
        after = self._encoder.encode(self._after, is_chat=True)
        room, length = limit - len(after), len(self._encoder.encode(second, is_chat=True))
        return before[:room] + after if len(before) - length <= room else ids

    def _render(self, first: str, second: str, instruction: str) -> str:
        if self._has_template:
            return self._encoder.render(_messages(first, second, instruction), ChatOptions())
        task = instruction or DEFAULT_INSTRUCTION
        return f"{_BEFORE}<Instruct>: {task}\n<Query>: {first}\n<Document>: {second}{_AFTER}"

    def _takes_pairs(self) -> bool:
        try:
            text = self._encoder.render(_messages(*_PROBES, ""), ChatOptions())
        except InvalidRequest:
            return False
        return all(probe in text for probe in _PROBES)

    def _cut(self, text: str, most: int | None) -> str:
        if most is None:
            return text
        ids = self._encoder.encode(text, is_chat=True)
        return text if len(ids) <= most else self._encoder.decode(ids[:most], False)

    def _id_of(self, token: int | str) -> int:
        if isinstance(token, int):
            return token
        ids = self._encoder.encode(token, is_chat=True)
        if len(ids) != 1:
            raise ModelError(
                f"the model should score by the token {token!r}, which is {len(ids)} tokens of its"
                " tokenizer"
            )
        return ids[0]


def _messages(first: str, second: str, instruction: str) -> list[ChatMessage]:
    system = [ChatMessage("system", instruction)] if instruction else []
    return [*system, ChatMessage("query", first), ChatMessage("document", second)]
