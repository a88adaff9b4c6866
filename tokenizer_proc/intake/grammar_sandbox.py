"""Compile grammars under limits of time and memory, as a program of its own.

It is run by `python -m tokenizer_proc.intake.grammar_sandbox`. Each line of JSON on stdin,
[kind, text], is answered by one on stdout, [form, error]: the grammar in the library's form, or why
it is refused. No limit that the library takes bounds the time of every grammar, so that each one is
compiled in a fork, which can be killed. The worker compiles a grammar that has passed once more, in
a thread, in as much time.
"""

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quadriga.sampling.params import Grammar
from quadriga.server.grammars.grammar import (
    byte_vocabulary,
    check_begins,
    compile_grammar,
    load_vocabulary,
    to_library_form,
)
from quadriga.server.grammars.json_schema import OPTIONS
from quadriga.server.models.formats.tokenizer import tokenizer_json
from quadriga.server.processes.control_channel import signal_at_parents_death

if TYPE_CHECKING:
    from llguidance import LLTokenizer


MAX_CPU_S = 0.5
# This is address space; the library and the vocabulary take less than half of it.
MAX_MEMORY_BYTES = 2 << 30
MAX_ERROR_CHARS = 500


def main() -> None:
    """Serve stdin. argv: tokenizer's directory, vocab_size, comma-separated end-of-text ids."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the process ends with stdin
    signal_at_parents_death(signal.SIGKILL)  # also while it waits for a fork
    directory, vocab_size, eos = sys.argv[1:]
    eos_ids = frozenset(int(part) for part in eos.split(",") if part)
    vocabulary = load_vocabulary(tokenizer_json(Path(directory)), int(vocab_size), eos_ids)
    byte_vocabulary()  # the forks share it
    too_slow = f"it takes more than {MAX_CPU_S} s or too much memory to compile; simplify it"
    try:
        for line in sys.stdin:
            grammar = Grammar(*json.loads(line))
            answer = _check_in_fork(vocabulary, grammar, frees_lenient=False)
            if not answer and OPTIONS in grammar.text:
                answer = _check_in_fork(vocabulary, grammar, frees_lenient=True)
            print(answer or json.dumps(["", too_slow]), flush=True)
    except BrokenPipeError:
        os._exit(0)  # the frontend has died; what is left in stdout has no reader


def _check_in_fork(vocabulary: "LLTokenizer", grammar: Grammar, frees_lenient: bool) -> str:
    """Return the line that answers a grammar; "" if it takes too much."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        _limit_resources()
        with os.fdopen(write_end, "w") as pipe:
            pipe.write(_check_grammar(vocabulary, grammar, frees_lenient))
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return answer


def _limit_resources() -> None:
    signal_at_parents_death(signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)


def _check_grammar(vocabulary: "LLTokenizer", grammar: Grammar, frees_lenient: bool = False) -> str:
    """Return the line that answers a grammar. What is wrong is looked for only where it is."""
    try:
        form = to_library_form(grammar, vocabulary, finds_faults=False, frees_lenient=frees_lenient)
        check_begins(compile_grammar(vocabulary, form))
    except BaseException:  # a panic of the library is no Exception
        try:
            form = to_library_form(grammar, vocabulary, frees_lenient=frees_lenient)
            check_begins(compile_grammar(vocabulary, form))
        except BaseException as error:
            return json.dumps(["", str(error).strip()[:MAX_ERROR_CHARS] or type(error).__name__])
    return json.dumps([form, ""])


if __name__ == "__main__":
    main()
