"""`quadriga replay`: compute a request of a journal again, and compare its answer."""

import argparse
import json
import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from quadriga.client import Client
from quadriga.errors import ConfigError, InvalidRequest, QuadrigaError
from quadriga.llm.llm import CONNECT_TIMEOUT_S, OwnedServer, server_argv
from quadriga.sampling.params import SamplingParams
from quadriga.server.config.parser import CommandParser
from quadriga.server.models.adapters.store import COPIES_NAME, files_of
from quadriga.wire.adapter import AdapterRef
from quadriga.wire.grammar import GrammarForm
from quadriga.wire.packing import num_ids, pack_floats, unpack_floats, unpack_ids
from scheduler_proc.journal import file, recovery, writer

# A request as a journal has it, and as it is sent again.


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
    header: file.JournalHeader
    requests: list[recovery.RecoveredRequest]

    def find(self, request_id: str, index: int) -> recovery.RecoveredRequest:
        """Return a choice of a request.

        Raises:
            InvalidRequest: there is none, or it has no token and no vector.
        """
        found = [one for one in self.requests if one.message.request_id == request_id]
        if not found:
            raise InvalidRequest(
                f"{self.path} has no request {request_id!r}, but {len(self.requests)} others:"
                " --list shows them; of those that ended, the last ones are kept"
            )
        for one in found:
            if one.index == index:
                num_given = len(one.message.params.first_token_ids)
                if len(one.tokens) == num_given and not one.vector:
                    raise InvalidRequest(f"request {request_id} has no token yet: nothing compares")
                return one
        indexes = ", ".join(str(one.index) for one in found)
        raise InvalidRequest(f"request {request_id} has no choice {index}: it has {indexes}")


def open_recorded(directory: Path) -> RecordedJournal:
    """Read the journal in a directory, which a server may be writing.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    path = directory / writer.FILE_NAME
    try:
        contents = recovery.read_journal(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if contents.header is None:
        raise ConfigError(
            f"{directory} has no journal: give the directory of the server's --journal (without"
            " that flag, a server keeps its journal in its run directory, and removes it)"
        )
    return RecordedJournal(path, contents.header, contents.requests)


def prompt_of(request: recovery.RecoveredRequest) -> list[int]:
    """Return the prompt's token ids."""
    return unpack_ids(request.message.prompt_ids).tolist()


def params_of(request: recovery.RecoveredRequest) -> SamplingParams:
    """Return parameters that give the recorded tokens or vector again, and no more of them.

    Text does not stop them: the detokenizer finds a stop string after the tokens are computed.

    Raises:
        InvalidRequest: the request has a grammar that cannot be sent again.
    """
    params, count = request.message.params, len(request.tokens)
    if params.pooling is not None:
        return SamplingParams(pooling=params.pooling)
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


# The command line of `quadriga replay`.

EXIT_EQUAL, EXIT_DIFFERS, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 2, 130
DESCRIPTION = """\
Compute a request of a journal again, and compare its tokens, or the log-probabilities of a
decision, with those of the journal.

Without --endpoint, a server of the journal's model is started for it, with the flags that this
command does not know itself: give those of the first server, such as --quantization int8.
The exit code is 0 if all tokens or numbers are equal, 1 if one differs, and 2 if they cannot be
compared."""


def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    try:
        arguments, flags = _parser().parse_known_args(argv)
        return _run(arguments, flags)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except QuadrigaError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_FAILED


def _parser() -> CommandParser:
    parser = CommandParser(
        "quadriga replay",
        usage="quadriga replay ID --journal DIR [--endpoint tcp://HOST:PORT | SERVER FLAGS]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add: Any = parser.add_argument
    add("id", metavar="ID", nargs="?", help="request_id of an answer or of its receipt")
    add("--journal", type=Path, required=True, metavar="DIR", help="--journal of the server")
    add("--list", action="store_true", help="list the requests of the journal")
    add("--choice", type=int, default=0, metavar="N", help="index of a choice (default: 0)")
    add("--endpoint", metavar="tcp://HOST:PORT", help="public socket of a running server")
    add("--curve-dir", metavar="DIR", help="this client's keys, if the server requires keys")
    return parser


def _run(arguments: argparse.Namespace, flags: list[str]) -> int:
    if (arguments.id is None) != arguments.list:
        raise ConfigError("give the ID of a request, or --list for all of them")
    if arguments.endpoint and flags:
        raise ConfigError(f"{flags[0]} is no flag of a replay on a running server: leave it out")
    journal = open_recorded(arguments.journal)
    if arguments.list:
        _list(journal)
        return EXIT_EQUAL
    request = journal.find(arguments.id, arguments.choice)
    prompt, params = prompt_of(request), params_of(request)
    adapter = request.message.adapter
    if adapter is not None and not arguments.endpoint:
        # With --dp, the journal of a replica is below the directory that has the copies.
        copies = (one / COPIES_NAME for one in (arguments.journal, arguments.journal.parent))
        flags = [*flags, "--lora-modules", f"{adapter.name}={files_of(adapter, *copies)}"]
    with _connected(arguments, flags, journal) as client:
        _check_model(journal, client.info())
        if adapter is None:
            answer = client.generate(prompt, params)
        else:
            _check_adapter(adapter, client.info())
            answer = client.generate(prompt, params, adapter=adapter.name)
        if answer.vector is not None:
            is_equal = _compare_numbers(arguments.id, request.vector, answer.vector)
        else:
            then = request.tokens.tolist()
            difference = first_difference(then, answer.token_ids)
            is_equal = difference is None
            if difference is None:
                print(f"equal: all {len(then)} tokens of {arguments.id}, seed {params.seed}")
            else:
                _print_difference(client, difference, len(then), len(prompt))
        # Asked for after the answer: while a worker starts, the server has no kernels to name.
        _print_kernels(request.kernels, client.info()["kernels"] or "")
    return EXIT_EQUAL if is_equal else EXIT_DIFFERS


def _compare_numbers(request_id: str, then: bytes, now: "array[float]") -> bool:
    """Print whether all log-probabilities are equal to the last bit, and return it."""
    if then == pack_floats(now):
        print(f"equal: all {len(now)} log-probabilities of {request_id}")
        return True
    old = unpack_floats(then)
    for index, (one, other) in enumerate(zip_longest(old, now)):
        if one != other:
            print(
                f"differs at log-probability {index + 1} of {len(old)}: {one} in the journal,"
                f" {other} now"
            )
            break
    return False


def _list(journal: RecordedJournal) -> None:
    header = journal.header
    print(f"model {header.model}, fingerprint {header.fingerprint}")
    for one in journal.requests:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.message.received_at))
        state = "under way" if one.ended is None else one.ended.finish_reason
        choice = f" --choice {one.index}" if one.index else ""
        count = (
            f"{num_ids(one.vector)} log-probabilities"
            if one.vector
            else (f"{len(one.tokens)} tokens")
        )
        print(f"{one.message.request_id}{choice}  {at}  {count}, {state}")


@contextmanager
def _connected(
    arguments: argparse.Namespace, flags: list[str], journal: RecordedJournal
) -> Iterator[Client]:
    """Connect to the running server, or to one that is started and ends with the block."""
    if arguments.endpoint:
        with Client(arguments.endpoint, curve_dir=arguments.curve_dir) as client:
            yield client
        return
    named = any(flag.partition("=")[0] == "--model" for flag in flags)
    own = server_argv(journal.header.model, {})[2 if named else 0 :]  # which begins with --model
    server = OwnedServer([*own, *flags])
    try:
        with Client(server.wait_until_ready(), CONNECT_TIMEOUT_S) as client:
            yield client
    finally:
        server.close()


def _check_model(journal: RecordedJournal, info: dict[str, Any]) -> None:
    header, served = journal.header, info["model_details"]["digest"]
    if served != header.fingerprint:
        raise ConfigError(
            f"the journal is of {header.model} (fingerprint {header.fingerprint}), and the server"
            f" has {info['model']} ({served}): compare with a server of the same model"
        )


def _check_adapter(adapter: AdapterRef, info: dict[str, Any]) -> None:
    served = info.get("adapter_ids", {}).get(adapter.name)
    if served != adapter.id:
        raise ConfigError(
            f"the request has adapter {adapter.name!r} with the content {adapter.id[:12]}, and the"
            f" server has {(served or 'none')[:12]}: load what {adapter.path} had then"
        )


def _print_difference(
    client: Client, difference: Difference, num_tokens: int, num_prompt: int
) -> None:
    def shown(token: int | None) -> str:
        return "the end" if token is None else f"{token} {client.detokenize([token])!r}"

    print(
        f"differs at token {difference.place + 1} of {num_tokens} (position"
        f" {num_prompt + difference.place} with the prompt): {shown(difference.then)} in the"
        f" journal, {shown(difference.now)} now"
    )


def _print_kernels(then: str, now: str) -> None:
    if then == now:
        print(f"the same model and kernels: {now}")
    else:
        print(f"the same model, other kernels: {then or 'unknown'} in the journal, {now} now")
