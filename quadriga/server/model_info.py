"""What the server's info says of the served model: its files, and its prompts for filling in.

The tokenizer process finds the marks of a prompt in the vocabulary and publishes them; the gateway
writes the prompts. This is called fill-in-the-middle (Bavarian et al., 2022,
https://arxiv.org/abs/2207.14255); the prompt with several files is that of Qwen2.5-Coder
(https://arxiv.org/abs/2409.12186).
"""

from typing import NamedTuple

import msgspec


class ModelDetails(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The files of the served model.

    Attributes:
        family: model_type of config.json.
        container: gguf or safetensors; "" for random weights.
        weight_format: format of most of the weights, or method and bits of a quantized checkpoint.
        num_parameters: number of values of all tensors.
        num_bytes: size of the tensors in the files.
        digest: fingerprint of configuration, tokenizer and weights.
        modified_at: Unix time of the last change of the weights; 0.0 for random ones.
        dimensions: numbers of config.json by Hugging Face's names, such as hidden_size.
    """

    family: str
    container: str = ""
    weight_format: str = ""
    num_parameters: int = 0
    num_bytes: int = 0
    digest: str = ""
    modified_at: float = 0.0
    dimensions: dict[str, int] = {}


def details_to_info(details: ModelDetails) -> dict[str, object]:
    """Return the details as a value of Info."""
    values: dict[str, object] = msgspec.to_builtins(details)
    return values


def details_from_info(values: object) -> ModelDetails:
    """Return the details of a value of Info."""
    return msgspec.convert(values, ModelDetails)


# Names in a prompt with several files, whose real ones the request does not have.
REPOSITORY_NAME = "repository"
FILE_NAME = "file"


class ContextFile(NamedTuple):
    """A file that is put before the text to be filled."""

    name: str
    text: str


class FillFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The marks of a prompt for filling in the middle; each is one token.

    Attributes:
        prefix: text before the text before the gap.
        suffix: text before the text after the gap.
        middle: ends the prompt; empty if the model has no such mark.
        suffix_first: the suffix is written before the prefix.
        repository: text before the name of a repository; empty if the model has no such mark.
        file: text before the name of a file; empty if the model has no such mark.
        stop_token_ids: ids that end the answer, beside the model's own.
    """

    prefix: str
    suffix: str
    middle: str = ""
    suffix_first: bool = False
    repository: str = ""
    file: str = ""
    stop_token_ids: list[int] = []

    def prompt(self, prefix: str, suffix: str, files: list[ContextFile] | None = None) -> str:
        """Return the prompt that asks for the text between `prefix` and `suffix`.

        Marks within the texts are not escaped.
        """
        before, after = self.prefix + prefix, self.suffix + suffix
        gap = after + before if self.suffix_first else before + after
        return self._context(files or []) + gap + self.middle

    def _context(self, files: list[ContextFile]) -> str:
        """Return the text of the other files, followed by the name of the file with the gap."""
        if not files:
            return ""
        if not self.file:
            return "".join(f"{file.text}\n" for file in files)
        repository = f"{self.repository}{REPOSITORY_NAME}\n" if self.repository else ""
        blocks = "".join(f"{self.file}{file.name}\n{file.text}\n" for file in files)
        return f"{repository}{blocks}{self.file}{FILE_NAME}\n"


def fill_format_to_info(fill_format: FillFormat | None) -> dict[str, object] | None:
    """Return the format as a value of Info; None for a model without one."""
    values: dict[str, object] | None = msgspec.to_builtins(fill_format)
    return values


def fill_format_from_info(values: object) -> FillFormat | None:
    """Return the format of a value of Info."""
    return msgspec.convert(values, FillFormat | None)
