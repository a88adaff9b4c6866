"""Conversion of a GGUF's metadata to tokenizer.json and tokenizer_config.json.

Source: the GGUF specification (ggml, docs/gguf.md); the pre-tokenizers of byte-level BPE are those
of the models' published tokenizer.json files.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quadriga.errors import ModelError
from quadriga.model_files.gguf.sentencepiece import build_sentencepiece_tokenizer
from quadriga.model_files.tokenizer import FILL_TOKENS_KEY

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

# Values of tokenizer.ggml.token_type.
CONTROL, USER_DEFINED = 3, 4

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_LLAMA3_WORD_NAMES = ("dbrx", "smaug-bpe")  # Llama 3's words, without its other rules
_SINGLE_DIGIT_NAMES = ("smollm", "refact", "starcoder")
# Control tokens that end an answer, beside the header's only eos_token_id.
_END_OF_TURN = ("<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>",
                "<end_of_turn>")  # fmt: skip

# Role in filling in the middle -> keys of the token's id, the older name last.
_FILL_TOKEN_KEYS = {
    "prefix": ("fim_pre", "prefix"),
    "suffix": ("fim_suf", "suffix"),
    "middle": ("fim_mid", "middle"),
    "pad": ("fim_pad",),
    "repository": ("fim_rep",),
    "file": ("fim_sep",),
}


def write_tokenizer(metadata: Mapping[str, Any], directory: Path) -> None:
    """Write both files. Raise ModelError for an unknown kind of tokenizer."""
    build_tokenizer(metadata).save(str(directory / "tokenizer.json"))
    text = json.dumps(_tokenizer_config(metadata), ensure_ascii=False, indent=1)
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def build_tokenizer(metadata: Mapping[str, Any]) -> "Tokenizer":
    """Build the fast tokenizer that the metadata describe. Raise ModelError if it is unknown."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        return _build_byte_level(metadata)
    if kind == "llama":
        tokenizer = build_sentencepiece_tokenizer(metadata)
        _add_bos(tokenizer, metadata, default=True)
        return tokenizer
    raise ModelError(
        f"the GGUF's tokenizer is of kind {kind!r}, only byte-level BPE ('gpt2') and SentencePiece"
        " ('llama') can be read from a GGUF; use the model's Hugging Face directory, which has a"
        " tokenizer.json"
    )


def _build_byte_level(metadata: Mapping[str, Any]) -> "Tokenizer":
    from tokenizers import AddedToken, Tokenizer, decoders, models

    pre = metadata.get("tokenizer.ggml.pre", "default")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        model = models.BPE(vocabulary, merges, ignore_merges=pre in _LLAMA3_NAMES)
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"the GGUF's vocabulary and merges do not fit together: {error}") from None
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        from tokenizers.normalizers import NFC

        tokenizer.normalizer = NFC()
    types = metadata.get("tokenizer.ggml.token_type", [])
    added = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    _add_bos(tokenizer, metadata, default=pre in _LLAMA3_NAMES)
    return tokenizer


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Return the ids that end an answer: the header's, and control tokens with known names."""
    named = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    types = metadata.get("tokenizer.ggml.token_type", [])
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    known = [
        token_id
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == CONTROL and token in _END_OF_TURN
    ]
    return list(dict.fromkeys([token_id for token_id in named if token_id is not None] + known))


def _pre_tokenizer(name: str) -> "PreTokenizer":
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    if name in ("default", "gpt-2"):
        return ByteLevel(add_prefix_space=False)
    if name in _SINGLE_DIGIT_NAMES:
        return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    if name in (*_LLAMA3_NAMES, *_LLAMA3_WORD_NAMES, "qwen2"):
        words = _QWEN2_WORDS if name == "qwen2" else _LLAMA3_WORDS
        split = Split(Regex(words), behavior="isolated")
        return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    raise ModelError(
        f"the GGUF's pre-tokenizer {name!r} is not known (known: default, gpt-2, "
        + ", ".join((*_SINGLE_DIGIT_NAMES, *_LLAMA3_NAMES, *_LLAMA3_WORD_NAMES))
        + ", qwen2); use the model's Hugging Face directory"
    )


def _add_bos(tokenizer: "Tokenizer", metadata: Mapping[str, Any], default: bool) -> None:
    from tokenizers.processors import TemplateProcessing

    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    if bos_id is None or not metadata.get("tokenizer.ggml.add_bos_token", default):
        return
    bos = metadata["tokenizer.ggml.tokens"][bos_id]
    tokenizer.post_processor = TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, bos_id)]
    )


def _tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    roles = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    for role, short in roles.items():
        token_id = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if token_id is not None:
            config[f"{short}_token"] = metadata["tokenizer.ggml.tokens"][token_id]
    if fill_tokens := _fill_tokens(metadata):
        config[FILL_TOKENS_KEY] = fill_tokens
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def _fill_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the header's tokens for filling in the middle, by role."""
    tokens = metadata["tokenizer.ggml.tokens"]
    names = {}
    for role, keys in _FILL_TOKEN_KEYS.items():
        ids = (metadata.get(f"tokenizer.ggml.{key}_token_id") for key in keys)
        token_id = next((token_id for token_id in ids if token_id is not None), None)
        if token_id is not None and token_id < len(tokens):
            names[role] = tokens[token_id]
    return names
