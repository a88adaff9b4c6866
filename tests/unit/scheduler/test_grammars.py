"""Requests wait in the scheduler until the worker has compiled their grammars."""

from quadriga.wire.grammar import GrammarForm
from quadriga.wire.packing import unpack_ids
from quadriga.wire.worker import CompileGrammar, FailedRow, ForgetGrammar
from scheduler_proc.held_requests import MAX_UNUSED
from tests.unit.scheduler.sampling_bench import GRAMMAR, GrammarBench
from tests.unit.simulation import abort


def test_only_requests_with_the_grammar_wait_for_it_and_it_is_compiled_once() -> None:
    bench = GrammarBench()
    bench.ask("first")
    bench.ask("second")
    assert bench.worker.sent.popleft() == CompileGrammar(GRAMMAR)
    assert not bench.worker.sent
    bench.ask("free", grammar=None)
    begun, planned = bench.plan(), bench.plan()
    assert len(begun.new) == 1 and not planned.new
    bench.ready()
    bench.answer(begun, [5])
    first, second = bench.plan().new
    assert first.rules is not None and second.rules is not None
    assert first.rules.grammar == second.rules.grammar == GRAMMAR.key
    assert unpack_ids(first.rules.stop_ids).tolist() == [2]


def test_a_request_that_waits_for_a_grammar_counts_as_waiting() -> None:
    bench = GrammarBench()
    bench.ask("held")
    bench.ask("held, too")
    bench.ask("free", grammar=None)
    info = bench.scheduler.info()
    assert (info["waiting"], info["running"]) == (2, 1)


def test_a_grammar_that_the_worker_cannot_compile_fails_its_requests_and_may_be_tried_again() -> (
    None
):
    bench = GrammarBench()
    bench.ask("a", n=2)
    bench.worker.sent.clear()
    closed = [end for output in bench.ready("no good") for end in output.closed]
    assert [end.finish_reason for end in closed] == ["error", "error"]
    assert closed[0].error is not None and closed[0].error.message == "no good"
    bench.ask("b")
    assert bench.worker.sent.popleft() == CompileGrammar(GRAMMAR)


def test_a_request_that_ends_while_it_waits_never_runs() -> None:
    bench = GrammarBench()
    bench.ask("a")
    bench.worker.sent.clear()
    bench.scheduler.step([abort("a")], [])
    bench.ready()
    assert not bench.worker.sent
    bench.scheduler.check()


def test_a_row_that_failed_ends_its_request_alone() -> None:
    bench = GrammarBench()
    bench.ask("a")
    bench.ask("b")
    bench.worker.sent.clear()
    bench.ready()
    outputs = bench.answer(bench.plan(), [5, 6], failed=[FailedRow(0, "no token")])
    closed = [end for output in outputs for end in output.closed]
    assert [(end.request_id, end.finish_reason) for end in closed] == [("a", "error")]
    assert [output.seqs for output in outputs if output.seqs] == [[1]]
    bench.end_all()
    bench.scheduler.check()


def test_the_worker_forgets_the_least_recently_used_grammar() -> None:
    bench = GrammarBench()
    grammars = [GrammarForm.of(f"start: /{i}/") for i in range(MAX_UNUSED + 1)]
    for grammar in grammars:
        bench.ask("x", grammar=grammar)
        bench.scheduler.step([abort("x")], [])
        bench.ready(key=grammar.key)
    forgotten = [message for message in bench.worker.sent if isinstance(message, ForgetGrammar)]
    assert forgotten == [ForgetGrammar(grammars[0].key)]
