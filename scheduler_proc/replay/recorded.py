"""A request as a journal has it, and as it is sent again."""

import json
from pathlib import Path
from typing import NamedTuple

import msgspec

from quadriga.errors import ConfigError, InvalidRequest
from quadriga.sampling.params import SamplingParams
from quadriga.wire.messages.arrays import unpack_ids
from quadriga.wire.messages.grammar import GrammarForm
from scheduler_proc.durability.journal_opening import FILE_NAME
from scheduler_proc.durability.journal_records import JournalHeader
from scheduler_proc.durability.journal_recovery import RecoveredRequest, read_journal


class Difference(NamedTuple):
    """The first token that differs.

    Attributes:
        place: number of tokens before it.
        then, now: token ids; None: the answer ends.
    """

    place: int
    then: int | None
    now: int | None


class RecordedJournal(NamedTuple):
    """A journal's header, and its requests in order."""

    path: Path
    header: JournalHeader
    requests: list[RecoveredRequest]

    def find(self, request_id: str, index: int) -> RecoveredRequest:
        """Return a choice of a request.

        Raises:
            InvalidRequest: there is none, or it has no token.
        """
        found = [one for one in self.requests if one.message.request_id == request_id]
        if not found:
            raise InvalidRequest(
                f"{self.path} has no request {request_id!r}, but {len(self.requests)} others:"
                " --list shows them; of those that ended, the last ones are kept"
            )
        for one in found:
            if one.index == index:
                if not one.tokens:
                    raise InvalidRequest(f"request {request_id} has no token yet: nothing compares")
                return one
        indexes = ", ".join(str(one.index) for one in found)
        raise InvalidRequest(f"request {request_id} has no choice {index}: it has {indexes}")


def open_recorded(directory: Path) -> RecordedJournal:
    """Read the journal in a directory, which a server may be writing.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    path = directory / FILE_NAME
    try:
        contents = read_journal(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if contents.header is None:
        raise ConfigError(
            f"{directory} has no journal: give the directory of the server's --journal (without"
            " that flag, a server keeps its journal in its run directory, and removes it)"
        )
    return RecordedJournal(path, contents.header, contents.requests)


def prompt_of(request: RecoveredRequest) -> list[int]:
    """Return the prompt's token ids."""
    return unpack_ids(request.message.prompt_ids).tolist()


def params_of(request: RecoveredRequest) -> SamplingParams:
    """Return parameters that give the recorded tokens again, and no more of them.

    Text does not stop them: the detokenizer finds a stop string after the tokens are computed.

    Raises:
        InvalidRequest: the request has a grammar that cannot be sent again.
    """
    params, count = request.message.params, len(request.tokens)
    form = request.message.grammar
    return msgspec.structs.replace(
        params,
        n=1,
        seed=(params.seed or 0) + request.index,
        max_new_tokens=count,
        min_new_tokens=min(params.min_new_tokens, count),
        stop=[],
        stop_regex=[],
        logprobs=None,
        prompt_logprobs=None,
        logprob_token_ids=[],
        text_lengths=False,
        **({} if form is None else grammar_fields(form)),
    )


def grammar_fields(form: GrammarForm) -> dict[str, str]:
    """Return the parameter that gives a grammar again, which a journal has in the library's form.

    Raises:
        InvalidRequest: there is no such parameter.
    """
    _, text = form.parts()
    if not text:
        return {}
    if not text.startswith("{"):
        return {"ebnf": text}
    try:
        (grammar,) = json.loads(text)["grammars"]
        schema = grammar["json_schema"]
    except (ValueError, LookupError, TypeError):
        raise InvalidRequest("the request's grammar cannot be sent again") from None
    return {"json_schema": json.dumps(schema)}


def first_difference(then: list[int], now: list[int]) -> Difference | None:
    """Return where two lists of token ids differ; None: they are equal."""
    for index in range(max(len(then), len(now))):
        old, new = (ids[index] if index < len(ids) else None for ids in (then, now))
        if old != new:
            return Difference(index, old, new)
    return None
