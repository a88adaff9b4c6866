"""Flags of the model: its files, its name, and what runs it."""

from dataclasses import dataclass

from quadriga.config.flags import check_positive, flag

BUILTIN_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """Model."""

    model: str = flag(
        BUILTIN_MODEL,
        "Hub id, directory, .gguf file, gpt2 and its sizes, or a built-in name",
        unit="MODEL",
        basic=True,
    )
    served_model_name: str = flag("", "name that clients see (default: --model)")
    revision: str = flag("", "branch, tag or commit of a Hub id (default: main)", unit="REVISION")
    tokenizer: str = flag(
        "",
        "Hub id, directory, .gguf file or built-in name whose tokenizer replaces the model's own"
        " (default: --model)",
        unit="MODEL",
    )
    chat_template: str = flag(
        "", "Jinja file that replaces the model's own chat template", unit="PATH"
    )
    load_format: str = flag(
        "auto", "dummy: random weights for a known architecture", ("auto", "dummy")
    )
    model_impl: str = flag(
        "auto",
        "native: the worker's own model files and kernels; transformers: any causal language model"
        " of the package transformers that has its attention interface (auto: native where there"
        " is a file for the model, else transformers)",
        ("auto", "native", "transformers"),
    )
    trust_remote_code: bool = flag(
        False,
        "let the worker run Python code of the model's repository (--model-impl transformers)",
    )
    context_length: int | None = flag(
        None, "tokens of context, if shorter than the model's own", unit="TOKENS", basic=True
    )

    def validate(self) -> None:
        """Raise ConfigError for the first flag that cannot work."""
        check_positive(self, "context_length")

    @property
    def shown_name(self) -> str:
        """Name that clients see."""
        return self.served_model_name or self.model
