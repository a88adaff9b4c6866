"""Loading of a tokenizer, for the frontend and the detokenizer, and of its chat template.

A directory says in several files which tokens are special: in tokenizer.json, in
tokenizer_config.json and, where that has no `added_tokens_decoder`, in special_tokens_map.json and
added_tokens.json. They are put together as transformers 5 does (`TokenizersBackend`).
"""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from quadriga.errors import ModelError
from quadriga.server.models.formats.directory import read_json, read_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Key of tokenizer_config.json: the names of a GGUF's tokens for filling in the middle, by role.
FILL_TOKENS_KEY = "fill_tokens"
# A file in the directory of a GGUF's header, whose tokenizer.json has all special tokens.
GGUF_INDEX = "tensors.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
               "mask_token")  # fmt: skip
# Keys of tokenizer_config.json: tokens by id, tokens without a name, and the older name of these.
_BY_ID, _EXTRA, _OLDER_EXTRA = (
    "added_tokens_decoder",
    "extra_special_tokens",
    "additional_special_tokens",
)


class AddedTokenSpec(msgspec.Struct, frozen=True):
    """A token that is found in a text before the rest of it is split, as in tokenizer.json.

    Attributes:
        content: its text.
        single_word: it is found between words only.
        lstrip, rstrip: it takes the spaces before or after it.
        normalized: it is looked for in the normalized text; None: unless it is special.
        special: it leaves no text in an answer.
    """

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None
    special: bool = False

    def decided(self, special: bool | None = None) -> "AddedTokenSpec":
        """Return it with a value of `normalized`, and with another one of `special` if given."""
        is_special = self.special if special is None else special
        normalized = not is_special if self.normalized is None else self.normalized
        names = AddedTokenSpec.__struct_fields__[:4]
        fields = {name: getattr(self, name) for name in names}
        return AddedTokenSpec(**fields, normalized=normalized, special=is_special)


class SpecialTokens(NamedTuple):
    """The special tokens that a directory names beside those of its tokenizer.json.

    Attributes:
        named: by names such as eos_token, which are variables of the chat template.
        by_id: tokens that are added in the order of their ids, whatever these are.
        others: tokens without a name.
        are_split: special tokens in a text are split as other words are.
    """

    named: dict[str, AddedTokenSpec]
    by_id: dict[int, AddedTokenSpec]
    others: list[AddedTokenSpec]
    are_split: bool = False

    @property
    def texts(self) -> dict[str, str]:
        """The texts of the named tokens."""
        return {name: token.content for name, token in self.named.items()}

    def added(self, known: Iterable[str]) -> list[AddedTokenSpec]:
        """Return the tokens to add to a tokenizer with these added tokens, in their order."""
        added = [token for _, token in sorted(self.by_id.items())]
        found = {*known, *(token.content for token in added)}
        for token in (*self.named.values(), *self.others):
            if token.content not in found and token not in added:
                added.append(token)
        texts = set(self.texts.values())
        return [token.decided(special=token.special or token.content in texts) for token in added]


class _Entry(AddedTokenSpec, frozen=True):
    id: int | None = None


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenizerFile(msgspec.Struct):
    """The part of a tokenizer.json that is read without the tokenizers library."""

    added_tokens: list[_Entry] | None = None


def load_tokenizer(directory: Path) -> "Tokenizer":
    """Load a tokenizer with all special tokens of its directory, without truncation and padding.

    The library's thread pool is switched off: the processes have threads of their own.

    Raises:
        ModelError: a file cannot be read.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import AddedToken, Tokenizer

    path = directory / TOKENIZER
    text = read_text(path)
    try:
        tokenizer = Tokenizer.from_str(text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"cannot read the tokenizer {path}: {error}") from None
    special = special_tokens(directory)
    known = (token.content for token in tokenizer.get_added_tokens_decoder().values())
    added = [] if _is_of_gguf(directory) else special.added(known)
    if added:
        tokenizer.add_tokens([AddedToken(**msgspec.structs.asdict(token)) for token in added])
    if special.are_split:
        tokenizer.encode_special_tokens = True
    return tokenizer


def tokenizer_json(directory: Path) -> str:
    """Return the contents of tokenizer.json, with all special tokens of the directory.

    Raises:
        ModelError: a file cannot be read.
    """
    text = read_text(directory / TOKENIZER)
    if _is_of_gguf(directory):
        return text
    entries = _read_entries(directory)
    known = {entry.decided() for entry in entries}
    added = special_tokens(directory).added(entry.content for entry in entries)
    return text if known.issuperset(added) else load_tokenizer(directory).to_str()


@lru_cache(maxsize=8)
def end_token_id(directory: Path) -> int | None:
    """Return the id of the `eos_token` of a directory's tokenizer; None if it has none.

    Raises:
        ModelError: a file cannot be read.
    """
    token = special_tokens(directory).named.get("eos_token")
    if token is None or not (directory / TOKENIZER).is_file():
        return None
    ids = [entry.id for entry in _read_entries(directory) if entry.content == token.content]
    return ids[0] if ids else load_tokenizer(directory).token_to_id(token.content)


def special_tokens(directory: Path) -> SpecialTokens:
    """Return the special tokens that a directory names beside those of its tokenizer.json.

    Raises:
        ModelError: a file cannot be read, or a field of it has another type.
    """
    path = directory / TOKENIZER_CONFIG
    config = read_json(path)
    if config.get(_OLDER_EXTRA) is not None:
        config[_OLDER_EXTRA] = _list_of(path, _OLDER_EXTRA, config[_OLDER_EXTRA])
        if not config.get(_EXTRA):
            config[_EXTRA] = config.pop(_OLDER_EXTRA)
    own = _take_own_names(path, config, str)
    by_id: dict[int, AddedTokenSpec] = {}
    by_text: dict[str, AddedTokenSpec] = {}
    if config.get(_BY_ID) is not None:
        for key, value in _map_of(path, _BY_ID, config[_BY_ID]).items():
            field = f"{_BY_ID}.{key}"
            by_id[_index(path, field, key)] = token = _token(path, field, value)
            by_text[token.content] = token
    else:
        _read_special_tokens_map(directory, config)
        own |= _take_own_names(path, config, ())
        _read_added_tokens(directory, config, by_id, by_text)
    named = _take_own_names(path, config, (str, dict, AddedTokenSpec)) | own
    for name in TOKEN_NAMES:
        if config.get(name) is not None:
            token = _token(path, name, config[name])
            named[name] = by_text.get(token.content, token)
    extra = config.get(_EXTRA, config.get(_OLDER_EXTRA))
    return SpecialTokens(
        {name: named[name] for name in (*TOKEN_NAMES, *named) if name in named},
        by_id,
        [_token(path, _EXTRA, value) for value in _list_of(path, _EXTRA, extra or [])],
        config.get("split_special_tokens") is True,
    )


def _take_own_names(
    path: Path, config: dict[str, Any], kinds: type | tuple[type, ...]
) -> dict[str, AddedTokenSpec]:
    """Take tokens with names of the model's own, such as image_token, whose values are of `kinds`.

    The names in a map of `extra_special_tokens` are taken, too.
    """
    names = [name for name in config if name.endswith("_token") and name not in TOKEN_NAMES]
    found = [name for name in names if isinstance(config[name], kinds)]
    named = {name: _token(path, name, config.pop(name)) for name in found}
    if isinstance(config.get(_EXTRA), dict):
        named |= _map_of_tokens(path, config.pop(_EXTRA))
    return named


def _map_of_tokens(path: Path, values: dict[str, Any]) -> dict[str, AddedTokenSpec]:
    return {name: _token(path, f"{_EXTRA}.{name}", value) for name, value in values.items()}


def _read_special_tokens_map(directory: Path, config: dict[str, Any]) -> None:
    """Read special_tokens_map.json over the values of `config`."""
    path = directory / "special_tokens_map.json"
    for name, value in read_json(path).items():
        if name == _OLDER_EXTRA and value is not None:
            config[name] = _list_of(path, name, value)
        elif name == _EXTRA and isinstance(value, list):
            tokens = list(config.get(_EXTRA) or [])
            for item in _list_of(path, name, value):
                token = item if isinstance(item, str) else item.decided(special=True)
                if token not in tokens:
                    tokens.append(token)
            config[_EXTRA] = tokens
        elif name == _EXTRA and isinstance(value, dict):
            config[name] = _map_of_tokens(path, value)
        elif isinstance(value, dict):
            config[name] = _token(path, name, value).decided(special=True)
        else:
            config[name] = value


def _read_added_tokens(
    directory: Path,
    config: Mapping[str, Any],
    by_id: dict[int, AddedTokenSpec],
    by_text: dict[str, AddedTokenSpec],
) -> None:
    """Read added_tokens.json, and the added tokens of tokenizer.json."""
    path = directory / "added_tokens.json"
    special = {_text(config.get(name)) for name in TOKEN_NAMES}
    extra = config.get(_EXTRA)
    special |= {_text(value) for value in extra} if isinstance(extra, list) else set()
    for content, number in read_json(path).items():
        is_special = content in special
        token = AddedTokenSpec(content, normalized=not is_special, special=is_special)
        by_id[_index(path, content, number)] = by_text[content] = token
    for entry in _read_entries(directory):
        if entry.id is not None:
            by_id[entry.id] = by_text[entry.content] = entry.decided()


def _is_of_gguf(directory: Path) -> bool:
    return (directory / GGUF_INDEX).is_file()


def _read_entries(directory: Path) -> list[_Entry]:
    """Return the added tokens of tokenizer.json; empty without a file."""
    path = directory / TOKENIZER
    if not path.is_file():
        return []
    try:
        file = msgspec.json.decode(read_text(path), type=_TokenizerFile)
    except msgspec.MsgspecError as error:
        raise ModelError(f"cannot read the tokenizer {path}: {error}") from None
    return file.added_tokens or []


def _token(path: Path, field: str, value: Any) -> AddedTokenSpec:
    """Return a token of a JSON file, which is a text or a map with its content."""
    if isinstance(value, AddedTokenSpec):
        return value
    if isinstance(value, str):
        return AddedTokenSpec(value, normalized=False, special=True)
    try:
        return msgspec.convert(value, AddedTokenSpec)
    except msgspec.ValidationError:
        raise _wrong(path, field, value, "a text, or a map with content and flags") from None


def _list_of(path: Path, field: str, value: Any) -> list[str | AddedTokenSpec]:
    """Return a list of tokens, which are texts or maps with their contents."""
    if not isinstance(value, list):
        raise _wrong(path, field, value, "a list of tokens")
    return [
        item if isinstance(item, str) else _token(path, f"{field}[{index}]", item)
        for index, item in enumerate(value)
    ]


def _text(value: Any) -> str | None:
    if isinstance(value, AddedTokenSpec):
        return value.content
    return value if isinstance(value, str) else None


def _map_of(path: Path, field: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(path, field, value, "a map of ids to tokens")
    return value


def _index(path: Path, field: str, value: Any) -> int:
    try:
        return msgspec.convert(value, int, strict=False)
    except msgspec.ValidationError:
        raise _wrong(path, field, value, "a token id") from None


def _wrong(path: Path, field: str, value: Any, wanted: str) -> ModelError:
    return ModelError(f"cannot read {path}: {field} is {value!r:.80}, and should be {wanted}")


def template_source(tokenizer_dir: Path, config: dict[str, Any]) -> str | None:
    """Return the text of a directory's chat template; None if it has none.

    Of several templates it is the one with the name default, or the only one.

    Args:
        tokenizer_dir: the directory.
        config: contents of its tokenizer_config.json.

    Raises:
        ModelError: the template cannot be read, or none of several has the name default.
    """
    file = tokenizer_dir / "chat_template.jinja"
    if file.exists():
        return read_text(file)
    templates = _named_templates(tokenizer_dir, config)
    if len(templates) == 1:
        return next(iter(templates.values()))
    if templates and "default" not in templates:
        shown = ", ".join(map(repr, templates))
        raise ModelError(
            f"cannot read {tokenizer_dir / TOKENIZER_CONFIG}: chat_template has the names {shown},"
            " and none is 'default'; choose a template with --chat-template FILE"
        )
    return templates.get("default")


def tool_template_source(tokenizer_dir: Path, config: dict[str, Any]) -> str | None:
    """Return the text of a directory's template for chats with tools; None if it has no other one.

    Args:
        tokenizer_dir: the directory.
        config: contents of its tokenizer_config.json.

    Raises:
        ModelError: the template cannot be read.
    """
    file = tokenizer_dir / "additional_chat_templates" / "tool_use.jinja"
    if file.exists():
        return read_text(file)
    if (tokenizer_dir / "chat_template.jinja").exists():
        return None
    return _named_templates(tokenizer_dir, config).get("tool_use")


def _named_templates(tokenizer_dir: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the templates in tokenizer_config.json: a text, a map, or a list of names and texts.

    Raises:
        ModelError: the value is none of these.
    """
    value = config.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    with suppress(msgspec.ValidationError):
        if isinstance(value, dict):
            return msgspec.convert(value, dict[str, str])
        entries = msgspec.convert(value, list[_NamedTemplate])
        return {entry.name: entry.template for entry in entries}
    raise _wrong(
        tokenizer_dir / TOKENIZER_CONFIG,
        "chat_template",
        value,
        'a text, a map {"default": text}, or a list of {"name": name, "template": text}',
    )
