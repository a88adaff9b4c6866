"""Conversion of a GGUF's metadata to tokenizer.json and tokenizer_config.json.

First the pre-tokenizers of byte-level BPE by llama.cpp's names, then tokenizers of the kind "llama"
(SentencePiece's byte-pair encoding, with byte fallback), then the conversion.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quadriga.errors import ModelError
from quadriga.server.models.formats.tokenizer import FILL_TOKENS_KEY

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer


# Pre-tokenizers of byte-level BPE, by the names that llama.cpp has for them.
#
# Each is a list of expressions. The first one cuts a text into its matches and what lies between
# them, the next one cuts each of these pieces, and so on. Where llama.cpp has a simpler
# expression than the model's published tokenizer.json, the published one is taken.

_SHORT_FORMS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_LLAMA3 = _SHORT_FORMS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    _SHORT_FORMS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    + _SPACES
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST_WITH_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES


def _cased_words(end: str) -> str:
    """Return an expression of words that end where a small letter is before a capital one."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{_UPPER}*{_LOWER}+{end}|{before}{_UPPER}+{_LOWER}*{end}"


_TEKKEN = _cased_words("") + r"|\p{N}" + _REST_WITH_SLASH
_GPT4O = _cased_words(f"{_SHORT_FORMS}?") + r"|\p{N}{1,3}" + _REST_WITH_SLASH
_DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
)
_HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# The cased letters that DeepSeek LLM knows; Unicode has got more since.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    "\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM_PUNCTUATION = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_POINTS = "\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c"
_BLOOM = rf" ?[^(\s|.,!?{_POINTS})]+"
_JAIS2 = _LLAMA3.replace(
    r"\s+(?!\S)|\s+",
    "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
    + r"|\s{1}",
)


class PreTokenizerRule(NamedTuple):
    """How a text is cut into words, and what goes with that.

    Attributes:
        expressions: applied one after the other.
        names: what llama.cpp calls it.
        takes_whole_words: a word that is a token is not made of merges.
        begins_with_bos: the default of tokenizer.ggml.add_bos_token.
    """

    expressions: tuple[str, ...]
    names: tuple[str, ...]
    takes_whole_words: bool = False
    begins_with_bos: bool = False


_RULES = (
    PreTokenizerRule(
        (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"), ("default",)
    ),
    PreTokenizerRule(
        (_GPT2,),
        ("gpt-2", "phi-2", "a.x-4.0", "exaone4", "gigachat", "granite-docling", "jais", "mellum",
         "mpt", "olmo", "trillion"),
    ),
    PreTokenizerRule(
        (r"\p{N}", _GPT2),
        ("smollm", "refact", "starcoder", "codeshell", "command-r", "exaone", "mellum2",
         "minerva-7b"),
    ),
    PreTokenizerRule(
        (_LLAMA3,),
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2", "midm-2.0", "pixtral"),
        takes_whole_words=True,
        begins_with_bos=True,
    ),
    PreTokenizerRule((_LLAMA3,), ("dbrx", "smaug-bpe", "chatglm-bpe")),
    PreTokenizerRule((_LLAMA3,), ("glm4", "glm5"), takes_whole_words=True),
    PreTokenizerRule(
        (_QWEN2,),
        ("qwen2", "deepseek-r1-qwen", "f2llmv2", "grok-2", "hunyuan", "kormo", "megrez",
         "solar-open", "stablelm2"),
    ),
    PreTokenizerRule((_QWEN35,), ("qwen35",)),
    PreTokenizerRule((_TEKKEN,), ("tekken",), takes_whole_words=True, begins_with_bos=True),
    PreTokenizerRule((_GPT4O,), ("gpt-4o", "kanana2", "llama4", "minimax-m2", "talkie")),
    PreTokenizerRule(
        (
            "[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            rf"\s?[{_DEEPSEEK_LLM_PUNCTUATION}]+",
            r"\s+$",
            _CJK,
            r"\p{N}+",
        ),
        ("deepseek-llm",),
    ),
    PreTokenizerRule(
        ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"), ("deepseek-coder",)
    ),
    PreTokenizerRule(
        (r"\p{N}{1,3}", _HAN_AND_KANA, _DEEPSEEK_V3),
        ("deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"),
    ),
    PreTokenizerRule(
        (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"), ("falcon",)
    ),
    PreTokenizerRule((_BLOOM,), ("bloom", "gpt3-finnish", "poro-chat")),
    PreTokenizerRule((_BLOOM, r"\p{N}"), ("viking",)),
    PreTokenizerRule((_JAIS2,), ("jais-2",)),
    PreTokenizerRule(("[^\n]+|[\n]+", _QWEN2), ("laguna",)),
    PreTokenizerRule(
        (r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")), ("minicpm5",), takes_whole_words=True
    ),
    PreTokenizerRule(
        (_QWEN2.replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+"),), ("seed-coder",)
    ),
    PreTokenizerRule((_QWEN2.removeprefix(f"{_SHORT_FORMS}|"),), ("ufakzeka",)),
)  # fmt: skip
RULES = {name: rule for rule in _RULES for name in rule.names}


def find_rule(name: str) -> PreTokenizerRule:
    """Return the rule of a value of tokenizer.ggml.pre. Raise ModelError for an unknown one."""
    if name not in RULES:
        raise ModelError(
            f"the GGUF's pre-tokenizer {name!r} is not known (known: {', '.join(RULES)}); use the"
            " model's Hugging Face directory"
        )
    return RULES[name]


def build_pre_tokenizer(rule: PreTokenizerRule) -> "PreTokenizer":
    """Build the pre-tokenizer of a rule, which also maps bytes to characters."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    # The library has parts of its own for two expressions.
    expressions = list(rule.expressions)
    ends_with_gpt2 = expressions[-1] == _GPT2
    if ends_with_gpt2:
        expressions.pop()
    parts: list[PreTokenizer] = [
        Digits(individual_digits=True)
        if expression == r"\p{N}"
        else Split(Regex(expression), behavior="isolated")
        for expression in expressions
    ]
    return Sequence([*parts, ByteLevel(add_prefix_space=False, use_regex=ends_with_gpt2)])


# Tokenizers of the kind "llama": SentencePiece's byte-pair encoding, with byte fallback.
#
# A GGUF has the pieces with their scores, and no merges. They are made as transformers makes
# those of a tokenizer.json: the pair that gives the piece with the highest score is merged first.

SPACE = "▁"
# Values of tokenizer.ggml.token_type.
_NORMAL_KIND, _USER_DEFINED_KIND = 1, 4
# Tokens of a Phi-3 that keep the spaces after them; its other special tokens swallow these. A GGUF
# does not say so; llama.cpp has the same list.
PHI3_KEEP_SPACES = ("<unk>", "<s>", "<|endoftext|>")

Merge = tuple[str, str]


def build_sentencepiece_tokenizer(
    metadata: Mapping[str, Any], control: Collection[int]
) -> "Tokenizer":
    """Build a tokenizer that gives the ids of the model's published tokenizer.json.

    Args:
        metadata: the GGUF's.
        control: ids of tokens that no answer shows.

    Raises:
        ModelError: the vocabulary has no unknown token, or no scores.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    tokens = _pieces(metadata["tokenizer.ggml.tokens"])
    types, scores = metadata["tokenizer.ggml.token_type"], metadata["tokenizer.ggml.scores"]
    if not len(tokens) == len(types) == len(scores):
        raise ModelError(
            f"the GGUF's vocabulary has {len(tokens)} tokens, {len(types)} types and {len(scores)}"
            " scores; make the file again from the model's Hugging Face directory"
        )
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    model = models.BPE(
        vocabulary,
        list(_merges(tokens, types, scores, vocabulary)),
        unk_token=tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    escape: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    unescape: list[decoders.Decoder] = [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        escape.insert(0, normalizers.Prepend(SPACE))
        unescape.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(escape)
    tokenizer.decoder = decoders.Sequence(unescape)
    strips = metadata.get("general.architecture") == "phi3"
    tokenizer.add_tokens(
        [
            AddedToken(
                token,
                special=token_id in control,
                normalized=False,
                rstrip=strips and token not in PHI3_KEEP_SPACES,
            )
            for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if token_id in control or kind == _USER_DEFINED_KIND
        ]
    )
    return tokenizer


def _pieces(tokens: list[str]) -> list[str]:
    """Return the tokens as SentencePiece spells them.

    Converters write spaces for a user-defined run of them. Old Gemma models have no tab, and their
    byte 9 takes its place in merges.
    """
    pieces = [token.replace(" ", SPACE) for token in tokens]
    if "\t" not in tokens and "<0x09>" in tokens:
        pieces[tokens.index("<0x09>")] = "\t"
    return pieces


def _merges(
    tokens: list[str], types: list[int], scores: list[float], vocabulary: Mapping[str, int]
) -> Iterator[Merge]:
    """Yield the pairs that give a token, those of the highest score first."""
    ranked = [
        # SentencePiece never splits what the user defined, whatever score the converter writes.
        (-math.inf if kind == _USER_DEFINED_KIND else -score, token)
        for token, kind, score in zip(tokens, types, scores, strict=True)
        if len(token) > 1 and kind in (_NORMAL_KIND, _USER_DEFINED_KIND)
    ]
    ranked.sort(key=itemgetter(0))
    for _, entries in groupby(ranked, key=itemgetter(0)):
        pairs = [
            (token[:middle], right)
            for _, token in entries
            for middle in range(len(token) - 1, 0, -1)
            if (right := token[middle:]) in vocabulary and token[:middle] in vocabulary
        ]
        # Of equal scores the longest left side is first; the pairs of one token are in this order.
        pairs.sort(key=lambda pair: (-len(pair[0]), -len(pair[1])))
        yield from pairs


# Source of the conversion: the GGUF specification (ggml, docs/gguf.md), and the tokens that
# llama.cpp knows by their text.

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
