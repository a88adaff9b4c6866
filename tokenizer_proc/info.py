"""The frontend's part of the server info: the model's files, its marks for infilling, the flags.

`InfoRequests` bounds the questions that are not answered yet.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quadriga.errors import ModelError
from quadriga.server.answer_format import AnswerFormat, to_info
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.model_info import (
    FillFormat,
    ModelDetails,
    details_to_info,
    fill_format_to_info,
)
from quadriga.server.model_list import ModelEntry
from quadriga.server.models.formats.directory import read_json
from quadriga.server.models.formats.quantization import read_quantization
from quadriga.server.models.formats.tokenizer import FILL_TOKENS_KEY
from quadriga.server.models.resolve import ModelFiles
from quadriga.server.models.weights import WeightSummary, summarize_weights, weight_files
from quadriga.wire.client import MAX_FRAME_BYTES, PROTOCOL_VERSION, InfoValues
from tokenizer_proc.intake.overload import check_room

if TYPE_CHECKING:
    from tokenizers import Tokenizer


# Hugging Face's name of a dimension -> GPT-2's, which some families have instead.
DIMENSIONS = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_head",
    "vocab_size": "vocab_size",
}


def model_details(files: ModelFiles) -> ModelDetails:
    """Return the details; those of the weights are empty if a file of them is damaged."""
    try:
        weights = summarize_weights(files, checks_files=False)
    except ModelError:  # the worker, which reads all of the file, reports it
        weights = WeightSummary()
    return ModelDetails(
        family=str(files.config.get("model_type") or ""),
        container=_container(files),
        weight_format=_weight_format(files, weights),
        num_parameters=weights.num_parameters,
        num_bytes=sum(weights.bytes_by_format.values()),
        digest=files.fingerprint,
        modified_at=_modified_at(files),
        dimensions=_dimensions(files.config),
    )


def _container(files: ModelFiles) -> str:
    if files.weights is None:
        return ""
    return "safetensors" if files.tensor_index is None else "gguf"


def _weight_format(files: ModelFiles, weights: WeightSummary) -> str:
    quantization = read_quantization(files.config)
    if quantization is not None:
        return str(quantization)
    return next((name for name, _ in weights.bytes_by_format.most_common(1)), "")


def _modified_at(files: ModelFiles) -> float:
    if files.weights is None:
        return 0.0
    return max((path.stat().st_mtime for path in weight_files(files.weights)), default=0.0)


def _dimensions(config: dict[str, Any]) -> dict[str, int]:
    values = {name: config.get(name, config.get(other)) for name, other in DIMENSIONS.items()}
    return {name: value for name, value in values.items() if isinstance(value, int)}


class KnownMarks(NamedTuple):
    """The marks of a family of models, as their published tokenizers name them."""

    prefix: str
    suffix: str
    middle: str = ""
    suffix_first: bool = False


# Source: the published tokenizer.json of a model of each family.
KNOWN_MARKS: tuple[KnownMarks, ...] = (
    KnownMarks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma
    KnownMarks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    KnownMarks("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    KnownMarks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
    KnownMarks("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    KnownMarks("<PRE>", "<SUF>", "<MID>"),
    KnownMarks("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4
    KnownMarks("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", True),  # Seed-Coder
    KnownMarks("[PREFIX]", "[SUFFIX]", suffix_first=True),  # Codestral
)
REPOSITORY_MARKS = ("<|repo_name|>", "<repo_name>", "<reponame>", "<|reponame|>")
FILE_MARKS = ("<|file_sep|>", "<file_sep>", "<|file_separator|>", "<|filename|>")
# Tokens beside the marks themselves that never belong to the text that fills a gap.
END_MARKS = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|endoftext|>", "▁<EOT>", "<EOT>",
             "<|cursor|>")  # fmt: skip


def find_fill_format(
    tokenizer: "Tokenizer", tokenizer_dir: Path, vocab_size: int
) -> FillFormat | None:
    """Return the format of a model that has the tokens, else None.

    The names come from the header of a GGUF, else from KNOWN_MARKS. A mark counts if its text is
    encoded as this one token, for prompts are sent as text, and if the model has its id.

    Args:
        tokenizer: the model's tokenizer.
        tokenizer_dir: the directory of its settings.
        vocab_size: number of ids of the model.
    """
    given = _given_names(tokenizer_dir / "tokenizer_config.json")

    def is_one_token(mark: str) -> bool:
        return _is_one_token(tokenizer, vocab_size, mark)

    marks = _marks(is_one_token, given)
    if marks is None:
        return None
    repository = _first(is_one_token, (given.get("repository", ""), *REPOSITORY_MARKS))
    file = _first(is_one_token, (given.get("file", ""), *FILE_MARKS))
    ends = (*marks[:3], repository, file, given.get("pad", ""), *END_MARKS)
    end_ids = {tokenizer.token_to_id(end) for end in ends if end}
    return FillFormat(
        prefix=marks.prefix,
        suffix=marks.suffix,
        middle=marks.middle,
        suffix_first=marks.suffix_first,
        repository=repository if file else "",
        file=file,
        stop_token_ids=sorted(
            end_id for end_id in end_ids if end_id is not None and end_id < vocab_size
        ),
    )


def _given_names(path: Path) -> dict[str, str]:
    """Return the names of the tokens by their roles, where the tokenizer's settings have them."""
    names = read_json(path).get(FILL_TOKENS_KEY)
    if not isinstance(names, dict):
        return {}
    return {role: name for role, name in names.items() if isinstance(name, str)}


def _marks(is_one_token: Callable[[str], bool], given: dict[str, str]) -> KnownMarks | None:
    candidates = KNOWN_MARKS
    if given.get("prefix") and given.get("suffix"):
        named = KnownMarks(given["prefix"], given["suffix"], given.get("middle", ""))
        alike = (known for known in KNOWN_MARKS if known[:2] == named[:2])
        candidates = (next(alike, named), *KNOWN_MARKS)
    complete = (known for known in candidates if all(map(is_one_token, filter(None, known[:3]))))
    return next(complete, None)


def _first(is_one_token: Callable[[str], bool], names: tuple[str, ...]) -> str:
    return next((name for name in names if name and is_one_token(name)), "")


def _is_one_token(tokenizer: "Tokenizer", vocab_size: int, mark: str) -> bool:
    """Return whether a text that contains the mark is encoded with the mark's own token."""
    token_id = tokenizer.token_to_id(mark)
    return (
        token_id is not None
        and token_id < vocab_size
        and token_id in tokenizer.encode(f"a{mark}b", add_special_tokens=False).ids
    )


MAX_PENDING_OF_CLIENT = 32
MAX_PENDING = 256
# A client no longer waits for the answer to a question that is older.
EXPIRY_S = 10.0


def static_server_info(
    config: ServerConfig,
    model: ModelFiles,
    has_chat: bool,
    answer_format: AnswerFormat,
    fill_format: FillFormat | None,
    pids: dict[str, int],
    models: Sequence[ModelEntry] = (),
) -> InfoValues:
    """Return the values that do not change while the server runs; docs/protocol.md lists them.

    Args:
        config: the flags of the model.
        model: its files.
        has_chat: whether it has a chat template.
        answer_format: how it writes reasoning and calls.
        fill_format: the marks of a prompt for filling in the middle; None: it has none.
        pids: ids of processes, by their names.
        models: all models of the server, if there are several.
    """
    endpoints = {name: one.endpoint for one in models for name in (one.name, *one.aliases)}
    return {
        **({"models": endpoints} if models else {}),
        "protocol": PROTOCOL_VERSION,
        "model": config.model.shown_name,
        "model_details": details_to_info(model_details(model)),
        "endpoint": config.frontend.endpoint,
        "context_length": model.context_length,
        "vocab_size": model.vocab_size,
        "max_frame_bytes": MAX_FRAME_BYTES,
        "max_batch_size": config.scheduler.max_batch_size,
        "prefill_max_batch_size": config.scheduler.prefill_width,
        "max_running_requests": config.scheduler.max_running_requests,
        "max_queued_requests": config.scheduler.max_queued_requests,
        "default_max_tokens": config.frontend.default_max_tokens,
        "chat": has_chat,
        "embeddings": ("" if model.is_encoder else config.frontend.pooling) or model.pooling,
        "prompts": list(model.prompts),
        "scores": scores_to_info(model),
        "encoder": model.is_encoder,
        "answer_format": to_info(answer_format),
        "fill_format": fill_format_to_info(fill_format),
        "tokenize_workers": config.frontend.tokenize_workers,
        "stream_interval": config.detok.stream_interval,
        "pids": dict(pids),
    }


def scores_to_info(model: ModelFiles) -> InfoValues | None:
    """Return what the info says of the model's scores; None if it has none."""
    scores = model.scores
    if scores is None:
        return None
    return {"labels": list(scores.labels), "probabilities": scores.probabilities}


class InfoRequests:
    """Count the unanswered GetInfo, FlushCache and GetProgress messages: each costs some work."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sent_at: dict[bytes, deque[float]] = {}

    def begin(self, client: bytes) -> None:
        """Count a question. Raise QueueFull where the client, or all together, have too many."""
        self._expire(client)
        num_of_client = len(self._sent_at.get(client, ()))
        num_of_all = sum(map(len, self._sent_at.values()))
        for count, limit, whose in (
            (num_of_client, MAX_PENDING_OF_CLIENT, " of this client"),
            (num_of_all, MAX_PENDING, ""),
        ):
            check_room(count, limit, f"questions{whose} are not answered yet")
        self._sent_at.setdefault(client, deque()).append(self._clock())

    def end(self, client: bytes) -> None:
        """Take back the oldest question of a client, which is answered."""
        sent_at = self._sent_at.get(client)
        if sent_at:
            sent_at.popleft()
            if not sent_at:
                del self._sent_at[client]

    def forget(self, client: bytes) -> None:
        """Take back all questions of a client that is gone."""
        self._sent_at.pop(client, None)

    def _expire(self, client: bytes) -> None:
        expired_at = self._clock() - EXPIRY_S
        while (sent_at := self._sent_at.get(client)) and sent_at[0] <= expired_at:
            self.end(client)
