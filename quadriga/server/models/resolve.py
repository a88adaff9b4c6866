"""Resolution of --model to files: a directory, a .gguf, a built-in name or a Hub id.

First --tokenizer and --chat-template, which replace files of the model, then the fingerprint of the
files, then the resolution of --model.
"""

import hashlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quadriga import disk
from quadriga.errors import ConfigError, InvalidRequest, ModelError
from quadriga.sampling.pooling import EMBED, LABEL, MEAN, RANK
from quadriga.server.config.engine_args import BUILTIN_MODEL, ModelArgs
from quadriga.server.models.families import architectures, bert, classifier, config_values, gpt
from quadriga.server.models.families.gpt import find_gpt2_size
from quadriga.server.models.formats import dense_modules
from quadriga.server.models.formats.directory import find_problem, has_code, read_config, read_json
from quadriga.server.models.formats.gguf_config import header_files
from quadriga.server.models.formats.gguf_reader import first_file, gguf_files
from quadriga.server.models.formats.sentence import (
    SentenceConfig,
    has_modules,
    read_sentence_config,
)
from quadriga.server.models.formats.tokenizer import end_token_id
from quadriga.server.models.sources import (
    BUILTINS,
    builtin_sampling,
    builtin_weights,
    cached_snapshot,
    looks_like_a_path,
    snapshot,
)

REMEDY = "give --tokenizer a directory or a .gguf file"


def find_tokenizer(source: str, show_progress: bool) -> Path:
    """Return a directory of tokenizer.json and tokenizer_config.json.

    Args:
        source: directory or file in it, .gguf file, Hub id, or a built-in name.
        show_progress: draw progress bars on stderr.

    Raises:
        ModelError: the tokenizer cannot be found or fetched.
    """
    if source in BUILTINS:
        return header_files(builtin_weights(show_progress, source))
    path = Path(source).expanduser().absolute()
    if path.name == "tokenizer.json" and path.is_file():
        return path.parent
    if path.is_file():
        return header_files(path)
    if path.is_dir():
        if not _has_tokenizer(path):
            raise ModelError(f"--tokenizer {source}: the directory has no tokenizer.json")
        return path
    if looks_like_a_path(source):
        what = "it is no regular file" if path.exists() else "there is no such file or directory"
        raise ModelError(f"--tokenizer {source}: {what}")
    size = find_gpt2_size(source)
    hub_id = source if size is None else size.hub_id
    try:
        directory = snapshot(
            hub_id, False, show_progress, is_complete=_has_tokenizer, remedy=REMEDY
        )
    except ModelError as error:
        raise ModelError(f"--tokenizer {source}: {error}") from None
    if not _has_tokenizer(directory):
        raise ModelError(f"--tokenizer {source}: the Hub's repository has no tokenizer.json")
    return directory


def find_chat_template(file: str) -> Path:
    """Return the absolute path of a chat template. Raise ModelError if it cannot be read."""
    path = Path(file).expanduser().absolute()
    try:
        disk.read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ModelError(f"--chat-template {file} cannot be read: {reason}") from None
    return path


def _has_tokenizer(directory: Path) -> bool:
    return (directory / "tokenizer.json").is_file()


# The last bytes of each weights file: two trainings of one model differ there.
TAIL_BYTES = 4096
DIGITS = 16
# Pieces of each weights file, evenly spread, whose bytes tell models apart that differ in few
# tensors, such as one and its fine-tune.
NUM_PIECES, PIECE_BYTES = 512, 1024


def fingerprint(config: dict[str, Any], tokenizer_dir: Path, weights: Path | None) -> str:
    """Return a short text that identifies a model, independent of the location of its files.

    It depends on the configuration, the tokenizer, and names, sizes and last bytes of the weights.

    Raises:
        ModelError: a file cannot be read.
    """
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    try:
        tokenizer = tokenizer_dir / "tokenizer.json"
        if tokenizer.is_file():
            digest.update(tokenizer.read_bytes())
        for file in _weight_files(weights):
            digest.update(f"{file.name} {file.stat().st_size}".encode())
            digest.update(_tail(file))
    except OSError as error:
        raise ModelError(f"cannot read {error.filename}: {error.strerror}") from None
    return digest.hexdigest()[:DIGITS]


def weights_digest(weights: Path | None) -> str:
    """Return a hash of many pieces of all weights files, to which changed tensors give another.

    Raises:
        ModelError: a file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for file in _weight_files(weights):
            size = file.stat().st_size
            digest.update(f"{file.name} {size}".encode())
            with file.open("rb", buffering=0) as opened:
                for piece in range(NUM_PIECES):
                    opened.seek(piece * max(0, size - PIECE_BYTES) // (NUM_PIECES - 1))
                    digest.update(opened.read(PIECE_BYTES))
    except OSError as error:
        raise ModelError(f"cannot read {error.filename}: {error.strerror}") from None
    return digest.hexdigest()


def _weight_files(weights: Path | None) -> list[Path]:
    if weights is None:
        return []
    if not weights.is_dir():
        return gguf_files(weights)
    modules = sorted(weights.glob(f"[0-9]*/{dense_modules.WEIGHTS}"))
    return [*sorted(weights.glob("*.safetensors")), *modules]


def _tail(file: Path) -> bytes:
    with file.open("rb") as opened:
        opened.seek(max(0, opened.seek(0, os.SEEK_END) - TAIL_BYTES))
        return opened.read(TAIL_BYTES)


# The launcher resolves once, with progress, and starts its children with `ModelFiles.location`,
# which resolves to the same files without a network.


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model.

    Attributes:
        name: the value of --model.
        location: a value of --model that resolves to the same files without a network.
        config: contents of config.json; for a GGUF, made from its header.
        generation_config: contents of generation_config.json, or {}.
        tokenizer_dir: directory of tokenizer.json and tokenizer_config.json.
        weights: directory of *.safetensors or a .gguf file, the first one of a split GGUF; None:
            random weights.
        tensor_index: for a .gguf, the tensors.json that `header_files` writes.
        context_limit: the value of --context-length.
        own_tokenizer: whether the tokenizer is the model's, and not that of --tokenizer.
        chat_template: Jinja file in place of the model's own template; None: the model's own.
        model_impl: the value of --model-impl.
        trust_remote_code: whether code of the model's repository may run.
        sentence: what a directory of sentence-transformers says of vectors; None: it is none.
        notes: lines to print at the start of the server.
    """

    name: str
    location: str
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tokenizer_dir: Path
    weights: Path | None
    tensor_index: Path | None = None
    context_limit: int | None = None
    own_tokenizer: bool = True
    chat_template: Path | None = None
    model_impl: str = "auto"
    trust_remote_code: bool = False
    sentence: SentenceConfig | None = None
    notes: tuple[str, ...] = ()

    @property
    def location_flags(self) -> dict[str, Any]:
        """Values of ModelArgs that resolve to the same files without a network."""
        return {
            "model": self.location,
            "revision": "",
            "tokenizer": "" if self.own_tokenizer else str(self.tokenizer_dir),
            "chat_template": str(self.chat_template or ""),
        }

    @property
    def vocab_size(self) -> int:
        """Number of ids that the model has, in its embedding and in its head.

        The tokenizer may have fewer ids, or more.
        """
        return int(self.config["vocab_size"])

    @property
    def hidden_size(self) -> int:
        """Number of elements of a hidden state."""
        keys = ("hidden_size", "n_embd", "d_model", "dim")
        return int(next(self.config[key] for key in keys if self.config.get(key)))

    @property
    def vector_size(self) -> int:
        """Number of elements of a text's vector."""
        dense = self.sentence.dense if self.sentence is not None else ()
        return dense[-1].out_features if dense else self.hidden_size

    @property
    def context_length(self) -> int:
        """Largest number of tokens of a request, prompt and completion together."""
        return self.context_limit or self.model_context_length

    @property
    def is_encoder(self) -> bool:
        """Whether the model makes vectors or scores only: each token sees the whole text."""
        return bert.is_encoder(self.config)

    @property
    def only_task(self) -> str:
        """What a model does that makes no text, EMBED, RANK or LABEL; "": it makes text."""
        if not self.is_encoder:
            return ""
        if self.scores is None:
            return EMBED
        return RANK if len(self.scores.labels) == 1 else LABEL

    @property
    def scores(self) -> classifier.Scores | None:
        """The scores of a model that classifies or ranks; None for others. Raises ModelError."""
        named = self.sentence.activation if self.sentence is not None else ""
        if self.is_encoder:
            return (
                classifier.read_scores(self.config, named, None)
                if classifier.has_head(self.config)
                else None
            )
        logit_score = self.sentence.logit_score if self.sentence is not None else None
        logit_score = logit_score or classifier.read_logit_score(self.config, self.name)
        return (
            None if logit_score is None else classifier.read_scores(self.config, named, logit_score)
        )

    @property
    def pooling(self) -> str:
        """How the vector of a text is made, if no flag says it; "": the model does not say it.

        The vectors of a model with a head are its scores.
        """
        if self.is_encoder and classifier.has_head(self.config):
            return ""
        if self.sentence is not None:
            return self.sentence.pooling
        return MEAN if self.is_encoder else ""

    @property
    def prompts(self) -> dict[str, str]:
        """What can be put before a text whose vector is asked for, by name."""
        return {} if self.sentence is None else self.sentence.prompts

    def prompt_before(self, name: str | None) -> str:
        """Return the prompt of a name; None: the default one, if there is one; "": none.

        Raises:
            InvalidRequest: the model has no such prompt.
        """
        if name is None:
            name = self.sentence.default_prompt if self.sentence is not None else ""
        if name and name not in self.prompts:
            known = (
                f"has the prompts {', '.join(self.prompts)}" if self.prompts else "has no prompts"
            )
            raise InvalidRequest(
                f"prompt_name is {name[:100]!r}: the model {known}; or leave it out", "prompt_name"
            )
        return self.prompts.get(name, "") if name else ""

    @property
    def model_context_length(self) -> int:
        """Number of tokens that the model was made for."""
        keys = ("max_position_embeddings", "n_positions", "n_ctx")
        length = int(next(self.config[key] for key in keys if self.config.get(key)))
        length -= bert.num_padding_positions(self.config)
        longest = self.sentence.max_tokens if self.sentence is not None else None
        return length if longest is None else min(length, longest)

    @property
    def fingerprint(self) -> str:
        """Text that identifies the model, independent of the location of its files."""
        return fingerprint(self.config, self.tokenizer_dir, self.weights)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a text: of config.json, generation_config.json and the tokenizer.

        Ids that the model does not have are left out, as it never samples them.
        """
        vocab_size = self.vocab_size
        return frozenset(i for i in self._named_eos_ids if 0 <= i < vocab_size)

    @property
    def eos_note(self) -> str:
        """What the start says about ids that cannot end a text; "" without such ids."""
        unserved = sorted(self._named_eos_ids - self.eos_token_ids)
        if not unserved:
            return ""
        left = "" if self.eos_token_ids else "; no other id ends a text"
        return (
            f"eos_token_id names {', '.join(map(str, unserved))}, which the model, whose ids are 0"
            f" to {self.vocab_size - 1}, does not have: left out{left}"
        )

    @property
    def _named_eos_ids(self) -> frozenset[int]:
        ids: set[int] = set()
        for source in (self.config, self.generation_config):
            value = source.get("eos_token_id")
            ids.update(value if isinstance(value, list) else [] if value is None else [value])
        if self.tensor_index is None or not self.own_tokenizer:  # a GGUF's are all in its header
            end = end_token_id(self.tokenizer_dir)
            if end is not None:
                ids.add(end)
        return frozenset(ids)


def resolve_model(args: ModelArgs, show_progress: bool = False) -> ModelFiles:
    """Find a model, and fetch it if needed.

    Args:
        args: --model and its companions.
        show_progress: draw progress bars on stderr.

    Raises:
        ModelError: the model cannot be found, fetched or used.
        ConfigError: --context-length is longer than the model's own, or --revision has no effect.
    """
    files = replace(
        _find(args, show_progress),
        context_limit=args.context_length,
        model_impl=args.model_impl,
        trust_remote_code=args.trust_remote_code,
    )
    if args.tokenizer:
        directory = find_tokenizer(args.tokenizer, show_progress)
        files = replace(files, tokenizer_dir=directory, own_tokenizer=False)
    if args.chat_template:
        files = replace(files, chat_template=find_chat_template(args.chat_template))
    _check_config(files)
    return replace(files, notes=(*files.notes, files.eos_note)) if files.eos_note else files


def _find(args: ModelArgs, show_progress: bool) -> ModelFiles:
    dummy = args.load_format == "dummy"
    size = gpt.find_gpt2_size(args.model)
    path = Path(args.model).expanduser()
    is_local = args.model in BUILTINS or path.exists() or (dummy and size is not None)
    if args.revision and is_local:
        raise ConfigError(
            f"--revision is {args.revision}, but --model {args.model} is not fetched from the Hub;"
            " leave the flag out"
        )
    if dummy and size is not None:
        return _dummy_gpt2(args, size, show_progress)
    if args.model in BUILTINS:
        fetched = builtin_weights(show_progress, args.model)
        if fetched.is_dir():
            return _from_directory(args, fetched, show_progress)
        return _from_gguf(args.model, fetched, dummy)
    if path.is_dir():
        return _from_directory(args, path, show_progress)
    if path.is_file():
        return _from_gguf(args.model, path, dummy)
    if path.exists():
        raise ModelError(f"--model {args.model} is neither a regular file nor a directory")
    if looks_like_a_path(args.model):
        raise ModelError(f"--model {args.model}: there is no such file or directory")
    hub_id = size.hub_id if size is not None else args.model
    directory = snapshot(
        hub_id,
        weights=not dummy,
        show_progress=show_progress,
        is_complete=lambda cached: (
            find_problem(cached, not dummy, not args.tokenizer) is None
            and (has_code(cached) or not args.trust_remote_code)
            and has_modules(cached)
        ),
        remedy=_remedy(size),
        revision=args.revision,
        code=args.trust_remote_code,
    )
    return _from_directory(args, directory, show_progress)


def _remedy(size: gpt.Gpt2Size | None) -> str:
    """Return what to do if the Hub does not have a model; `size` is that of a GPT-2."""
    if size is None:
        others = "give --model a directory or a .gguf file"
    else:
        name = size.hub_id.rsplit("/", 1)[-1]
        others = f"type --model {name} --load-format dummy for random weights"
    return f"{others}, or leave --model out for the built-in {BUILTIN_MODEL}"


def _from_gguf(name: str, path: Path, dummy: bool) -> ModelFiles:
    path = first_file(path.absolute())
    header = header_files(path)
    return ModelFiles(
        name=name,
        location=str(path),
        config=read_json(header / "config.json"),
        generation_config=read_json(header / "generation_config.json")
        | ({} if dummy else builtin_sampling(path)),
        tokenizer_dir=header,
        weights=None if dummy else path,
        tensor_index=None if dummy else header / "tensors.json",
    )


def _from_directory(args: ModelArgs, path: Path, show_progress: bool) -> ModelFiles:
    path, dummy = path.absolute(), args.load_format == "dummy"
    problem = find_problem(path, weights=not dummy, tokenizer=not args.tokenizer)
    config_is_enough = dummy and (path / "config.json").is_file()
    if problem and not config_is_enough:
        raise ModelError(f"{path} {problem}")
    files = ModelFiles(
        name=args.model,
        location=str(path),
        config=read_config(path),
        generation_config=read_json(path / "generation_config.json"),
        tokenizer_dir=path,
        weights=None if dummy else path,
        sentence=read_sentence_config(path),
    )
    return _with_stand_in_tokenizer(files, show_progress) if problem else files


def _dummy_gpt2(args: ModelArgs, size: gpt.Gpt2Size, show_progress: bool) -> ModelFiles:
    name = args.model
    files = ModelFiles(
        name=name,
        location=name,
        config=gpt.gpt2_config_json(size),
        generation_config={},
        tokenizer_dir=Path(),
        weights=None,
    )
    if args.tokenizer:
        return files
    for repository in (size.hub_id, name):
        cached = cached_snapshot(repository)
        if cached is not None and (cached / "tokenizer.json").is_file():
            return replace(files, tokenizer_dir=cached)
    return _with_stand_in_tokenizer(files, show_progress)


def _with_stand_in_tokenizer(files: ModelFiles, show_progress: bool) -> ModelFiles:
    """Add the built-in model's tokenizer, and its end-of-text ids, to random weights."""
    stand_in = _from_gguf(BUILTIN_MODEL, builtin_weights(show_progress), dummy=True)
    vocab_size = files.config.get("vocab_size")
    if isinstance(vocab_size, int) and vocab_size < stand_in.vocab_size:
        raise ModelError(
            f"{files.location} has no tokenizer.json, and the tokenizer of {BUILTIN_MODEL} cannot"
            f" take its place: it has {stand_in.vocab_size} ids, the model only {vocab_size}"
        )
    special = {key: stand_in.config[key] for key in ("bos_token_id", "eos_token_id")}
    note = f"{files.name} has no tokenizer here: that of {BUILTIN_MODEL} is taken"
    return replace(
        files,
        config={**files.config, **special},
        generation_config=stand_in.generation_config,
        tokenizer_dir=stand_in.tokenizer_dir,
        notes=(note,),
    )


def _check_config(files: ModelFiles) -> None:
    try:
        config_values.check_shared_types(files.config)
        config_values.check_shared_types(files.generation_config, "generation_config.json")
    except ModelError as error:
        raise type(error)(f"{files.location}: {error}") from None
    try:
        _ = files.scores
    except ModelError as error:
        raise type(error)(f"{files.location}: {error}") from None
    try:
        context_length, _ = files.model_context_length, files.vocab_size
    except (KeyError, StopIteration, TypeError, ValueError):
        _check_architecture(files)
        raise ModelError(
            f"the config.json of {files.location} has no vocab_size or no max_position_embeddings:"
            " it is not a text model's"
        ) from None
    if files.sentence is not None and files.sentence.dense:
        dense_modules.check_sizes(files.sentence.dense, files.hidden_size)
    if files.context_limit is not None and files.context_limit > context_length:
        raise ConfigError(
            f"--context-length is {files.context_limit}, but the context of {files.name} is"
            f" {context_length} tokens; leave the flag out or give at most that"
        )


def _check_architecture(files: ModelFiles) -> None:
    """Raise ModelError for an unsupported architecture, whose other problems do not matter."""
    if not files.config.get("model_type"):
        return
    try:
        architectures.find_architecture(files.config)
    except ModelError as error:
        raise ModelError(f"{files.location}: {error}") from None
