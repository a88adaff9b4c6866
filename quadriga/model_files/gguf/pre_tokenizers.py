"""Pre-tokenizers of byte-level BPE, by the names that llama.cpp has for them.

Each is a list of expressions. The first one cuts a text into its matches and what lies between
them, the next one cuts each of these pieces, and so on. Where llama.cpp has a simpler expression
than the model's published tokenizer.json, the published one is taken.
"""

from typing import TYPE_CHECKING, NamedTuple

from quadriga.errors import ModelError

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

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
        expressions: Applied one after the other.
        names: What llama.cpp calls it.
        takes_whole_words: A word that is a token is not made of merges.
        begins_with_bos: The default of tokenizer.ggml.add_bos_token.
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
