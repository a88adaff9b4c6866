"""Find the tokens of a vocabulary that mark prefix, suffix and middle of a text to be filled."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from quadriga.fill_format import FillFormat
from quadriga.model_files.directory import read_json
from quadriga.model_files.tokenizer import FILL_TOKENS_KEY

if TYPE_CHECKING:
    from tokenizers import Tokenizer


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
