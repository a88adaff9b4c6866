"""Compiles grammars where it can be stopped: `python -m tokenizer_proc.grammars.sandbox`.

A line of JSON on stdin, [kind, text], is answered by one on stdout, [form, error]: the grammar in
the library's form, or what is wrong with it. Each is compiled by a fork of its own, which ends with
its time: no limit that the library takes bounds the time of every grammar. A grammar that has
passed is compiled again by the worker, in a thread, in as much time.
"""

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quadriga.runtime.parent_death import signal_at_parents_death
from quadriga.sampling.grammar import (
    check_begins,
    compile_grammar,
    load_vocabulary,
    to_library_form,
)
from quadriga.sampling.params import Grammar

if TYPE_CHECKING:
    from llguidance import LLTokenizer

CPU_SECONDS = 0.5
MEMORY_BYTES = 2 << 30
"""Of address space, of which the library and the vocabulary take less than half."""
MAX_ERROR_CHARS = 500
"""Characters."""


def main() -> None:
    """argv: tokenizer.json, the model's vocab_size, its end-of-text ids with commas between."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the end of stdin says when to leave
    signal_at_parents_death(signal.SIGKILL)  # and this, if it is stopped or waits for a fork
    path, vocab_size, eos = sys.argv[1:]
    eos_ids = frozenset(int(part) for part in eos.split(",") if part)
    vocabulary = load_vocabulary(Path(path).read_text(encoding="utf-8"), int(vocab_size), eos_ids)
    for line in sys.stdin:
        sys.stdout.write(_check_in_fork(vocabulary, Grammar(*json.loads(line))) + "\n")
        sys.stdout.flush()


def _check_in_fork(vocabulary: "LLTokenizer", grammar: Grammar) -> str:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _limit()
        with os.fdopen(writing, "w") as answer:
            answer.write(_check(vocabulary, grammar))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer_line = pipe.read()
    os.waitpid(pid, 0)
    too_slow = f"it takes more than {CPU_SECONDS} s or too much memory to compile; simplify it"
    return answer_line or json.dumps(["", too_slow])


def _limit() -> None:
    signal_at_parents_death(signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)


def _check(vocabulary: "LLTokenizer", grammar: Grammar) -> str:
    try:
        form = to_library_form(grammar, vocabulary)
        check_begins(compile_grammar(vocabulary, form))
    except BaseException as error:  # a panic of the library is no Exception
        return json.dumps(["", str(error).strip()[:MAX_ERROR_CHARS] or type(error).__name__])
    return json.dumps([form, ""])


if __name__ == "__main__":
    main()
