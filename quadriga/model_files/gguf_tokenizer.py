"""Conversion of a GGUF's metadata to tokenizer.json and tokenizer_config.json.

Source: the GGUF specification (ggml, docs/gguf.md), and the tokens that llama.cpp knows by their
text.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quadriga.errors import ModelError
from quadriga.model_files.gguf.pre_tokenizers import build_pre_tokenizer, find_rule
from quadriga.model_files.gguf.sentencepiece import build_sentencepiece_tokenizer
from quadriga.model_files.tokenizer import FILL_TOKENS_KEY

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Values of tokenizer.ggml.token_type.
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
TEMPLATE_PREFIX = "tokenizer.chat_template."
# Ids of a SentencePiece vocabulary where the header has none.
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2}

# Tokens that end an answer, whatever their type, beside those that the header names.
_END_TOKENS = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
))  # fmt: skip
# An end token -> others of which one has to be in the vocabulary for it not to be one.
_NO_END_TOKENS = {
    "<|end|>": ({"<|return|>", "<|call|>"}, {"<|call|>", "<|flush|>"}, {"<|calls|>", "<|flush|>"},
                {"<|return|>", "<|calls|>"}),
    "</s>": ({"<|tool_response>"}, {"<|plamo:eos|>"}),
}  # fmt: skip

_END_MARKS = frozenset().union(*(other for groups in _NO_END_TOKENS.values() for other in groups))

# Role in filling in the middle -> keys of the token's id, the older name last.
_FILL_TOKEN_KEYS = {
    "prefix": ("fim_pre", "prefix"),
    "suffix": ("fim_suf", "suffix"),
    "middle": ("fim_mid", "middle"),
    "pad": ("fim_pad",),
    "repository": ("fim_rep",),
    "file": ("fim_sep",),
}
# Role -> names of the token where the header has no key.
_FILL_TOKEN_NAMES = {
    "prefix": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>",
               "<PRE>", "\u2581<PRE>", "<|code_prefix|>", "<|prefix|>"),
    "suffix": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>",
               "<SUF>", "\u2581<SUF>", "<|code_suffix|>", "<|suffix|>"),
    "middle": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>",
               "<MID>", "\u2581<MID>", "<|code_middle|>", "<|middle|>"),
    "pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "repository": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "file": ("<|file_sep|>",),
}  # fmt: skip
# Roles whose tokens end an answer as well.
_ENDING_FILL_ROLES = ("pad", "repository", "file")


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
        tokenizer = build_sentencepiece_tokenizer(metadata, _control_ids(metadata))
        _add_ends(tokenizer, metadata, begins_with_bos=True)
        return tokenizer
    raise ModelError(
        f"the GGUF's tokenizer is of kind {kind!r}, only byte-level BPE ('gpt2') and SentencePiece"
        " ('llama') can be read from a GGUF; use the model's Hugging Face directory, which has a"
        " tokenizer.json"
    )


def _build_byte_level(metadata: Mapping[str, Any]) -> "Tokenizer":
    from tokenizers import AddedToken, Tokenizer, decoders, models

    pre = metadata.get("tokenizer.ggml.pre") or "default"
    rule = find_rule(pre)
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        model = models.BPE(vocabulary, merges, ignore_merges=rule.takes_whole_words)
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"the GGUF's vocabulary and merges do not fit together: {error}") from None
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = build_pre_tokenizer(rule)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        from tokenizers.normalizers import NFC

        tokenizer.normalizer = NFC()
    types, control = metadata.get("tokenizer.ggml.token_type", []), _control_ids(metadata)
    shown = {token_id for token_id, kind in enumerate(types) if kind == USER_DEFINED}
    tokenizer.add_tokens(
        [
            AddedToken(tokens[token_id], special=token_id in control, normalized=False)
            for token_id in sorted(control | shown)
        ]
    )
    _add_ends(tokenizer, metadata, begins_with_bos=rule.begins_with_bos)
    return tokenizer


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Return the ids that end an answer: the header's, then those that are known by their text."""
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    named = [_token_id(metadata, f"{key}_token_id") for key in ("eos", "eot", "eom")]
    fill = [_fill_token_id(metadata, role) for role in _ENDING_FILL_ROLES]
    exempt = _exempt(tokens)
    ends = _END_TOKENS - exempt
    known = [token_id for token_id, token in enumerate(tokens) if token in ends]
    found = [token_id for token_id in (*named, *known, *fill) if token_id is not None]
    return [token_id for token_id in dict.fromkeys(found) if tokens[token_id] not in exempt]


def _exempt(tokens: Collection[str]) -> frozenset[str]:
    """Return the texts of _END_TOKENS that are no end tokens beside others of the vocabulary."""
    vocabulary = _END_MARKS.intersection(tokens)
    return frozenset(
        token
        for token, groups in _NO_END_TOKENS.items()
        if any(others <= vocabulary for others in groups)
    )


def _control_ids(metadata: Mapping[str, Any]) -> set[int]:
    """Return the ids of tokens that no answer shows: by their type, or by their text."""
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type", [])
    exempt = _exempt(tokens)
    ends = _END_TOKENS - exempt
    control = {
        token_id
        for token_id, kind in enumerate(types)
        if kind in (UNKNOWN, CONTROL) and tokens[token_id] not in exempt
    }
    control |= {token_id for token_id, token in enumerate(tokens) if token in ends}
    fill = {_fill_token_id(metadata, role) for role in _FILL_TOKEN_NAMES}
    texts = {text for names in _FILL_TOKEN_NAMES.values() for text in names}
    return control | {
        token_id for token_id in fill if token_id is not None and tokens[token_id] in texts
    }


def _fill_token_id(metadata: Mapping[str, Any], role: str) -> int | None:
    """Return the id of a token for filling in the middle, by the header or by its text."""
    for key in _FILL_TOKEN_KEYS[role]:
        if (token_id := _token_id(metadata, f"{key}_token_id")) is not None:
            return token_id
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    names = frozenset(_FILL_TOKEN_NAMES[role])
    return next((token_id for token_id, token in enumerate(tokens) if token in names), None)


def _token_id(metadata: Mapping[str, Any], key: str, default: int | None = None) -> int | None:
    """Return an id of the header; `default` if it is missing or not in the vocabulary."""
    num_tokens = len(metadata.get("tokenizer.ggml.tokens", []))
    for token_id in (metadata.get(f"tokenizer.ggml.{key}"), default):
        if token_id is not None and token_id < num_tokens:
            return int(token_id)
    return None


def _add_ends(tokenizer: "Tokenizer", metadata: Mapping[str, Any], begins_with_bos: bool) -> None:
    """Put the tokens before and after a text that the header asks for."""
    from tokenizers.processors import TemplateProcessing

    is_sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    adds = {
        "bos": metadata.get("tokenizer.ggml.add_bos_token", begins_with_bos),
        "eos": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    ids = {
        role: _token_id(
            metadata, f"{role}_token_id", _SENTENCEPIECE_IDS[role] if is_sentencepiece else None
        )
        for role, is_added in adds.items()
        if is_added
    }
    tokens = metadata["tokenizer.ggml.tokens"]
    first, last = (
        [tokens[token_id]] if (token_id := ids.get(role)) is not None else []
        for role in ("bos", "eos")
    )
    if first or last:
        tokenizer.post_processor = TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *last, *first, "$B:1", *last],
            special_tokens=[
                (tokens[token_id], token_id) for token_id in ids.values() if token_id is not None
            ],
        )


def _tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    roles = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    for role, short in roles.items():
        token_id = _token_id(metadata, f"{role}_token_id")
        if token_id is not None:
            config[f"{short}_token"] = metadata["tokenizer.ggml.tokens"][token_id]
    if fill_tokens := _fill_tokens(metadata):
        config[FILL_TOKENS_KEY] = fill_tokens
    if templates := _chat_templates(metadata):
        config["chat_template"] = templates
    return config


def _chat_templates(metadata: Mapping[str, Any]) -> str | list[dict[str, str]] | None:
    """Return the only template, or all with their names."""
    default = metadata.get("tokenizer.chat_template")
    named = [
        {"name": key.removeprefix(TEMPLATE_PREFIX), "template": template}
        for key, template in metadata.items()
        if key.startswith(TEMPLATE_PREFIX)
    ]
    if not named:
        return default
    return [*([{"name": "default", "template": default}] if default else []), *named]


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
