"""The scheduler, driven by a simulated worker and a simulated clock."""

from quadriga.config import SchedulerArgs
from quadriga.messages import AbortAll, Drain, StopFound
from scheduler_proc.request import Status
from tests.unit.simulation import EOS, World, abort, next_token, reference, submit


def args(**flags: int) -> SchedulerArgs:
    return SchedulerArgs(**flags)  # type: ignore[arg-type]


def test_every_request_gets_the_tokens_that_it_would_get_alone() -> None:
    world = World(args(max_batch_size=3, prefill_max_batch_size=2, max_running_requests=6))
    prompts = {f"r{i}": [5 + i] * (1 + i % 7) for i in range(20)}
    world.tell(*(submit(name, prompt, 9) for name, prompt in prompts.items()))
    world.run()
    for name, prompt in prompts.items():
        assert world.detok.tokens[name] == reference(prompt, 9, False)
        assert world.detok.closed[name].finish_reason in ("stop", "length")


def test_one_iteration_prefills_at_most_prefill_max_batch_size_requests_in_one_step() -> None:
    world = World(args(max_batch_size=8, prefill_max_batch_size=3))
    world.tell(*(submit(f"r{i}", [9], 4, ignore_eos=True) for i in range(7)))
    world.run()
    assert [len(rows) for rows in world.worker.rows_of_steps[:3]] == [3, 3, 1]


def test_prefill_width_is_the_decode_width_where_unset() -> None:
    world = World(args(max_batch_size=2))
    world.tell(*(submit(f"r{i}", [9], 4, ignore_eos=True) for i in range(4)))
    world.run()
    assert [len(rows) for rows in world.worker.rows_of_steps[:2]] == [2, 2]


def test_requests_admitted_together_share_one_admit_time() -> None:
    world = World(args(max_batch_size=4))
    world.tell(*(submit(f"r{i}", [9], 2, ignore_eos=True) for i in range(4)))
    world.run()
    assert len({closed.admitted for closed in world.detok.closed.values()}) == 1


def test_decode_takes_turns_when_more_are_running_than_fit_in_a_step() -> None:
    world = World(args(max_batch_size=2, prefill_max_batch_size=5))
    world.tell(*(submit(f"r{i}", [9], 7, ignore_eos=True) for i in range(5)))
    world.run()
    decodes = world.worker.rows_of_steps[1:]
    assert all(len(rows) <= 2 for rows in decodes)
    seen: set[int] = set()
    for rows in decodes[:3]:
        seen |= set(rows)
    assert len(seen) == 5


def test_the_token_budget_of_a_prefill_step_is_kept_and_a_larger_prompt_goes_alone() -> None:
    world = World(args(prefill_max_tokens=6))
    world.tell(
        submit("a", [9] * 4, 1),
        submit("b", [9] * 4, 1),
        submit("c", [9] * 20, 1),
        submit("d", [9] * 2, 1),
    )
    world.run()
    assert [len(rows) for rows in world.worker.rows_of_steps] == [1, 1, 1, 1]
    assert len(world.detok.closed) == 4


def test_a_request_that_ends_in_prefill_never_decodes() -> None:
    world = World(args())
    world.tell(submit("a", [9, 9], 1))
    assert world.run() == 1
    assert world.detok.closed["a"].finish_reason == "length"


def test_no_step_is_planned_past_max_new_tokens() -> None:
    world = World(args())
    world.tell(submit("a", [9, 9], 5, ignore_eos=True))
    assert world.run() == 5


def test_a_stop_token_costs_at_most_one_wasted_step_whose_token_is_dropped() -> None:
    prompt = next(
        [i, j]
        for i in range(3, 90)
        for j in range(3, 90)
        if EOS in reference([i, j], 6, False)[1:4]
    )
    expected = reference(prompt, 20, False)
    world = World(args())
    world.tell(submit("a", prompt, 20))
    assert world.run() <= len(expected) + 1
    assert world.detok.tokens["a"] == expected
    assert world.detok.closed["a"].matched_stop == EOS


def test_stop_token_ids_stop_and_ignore_eos_does_not_switch_them_off() -> None:
    wanted = next_token([7, 7])
    world = World(args())
    world.tell(submit("a", [7, 7], 9, ignore_eos=True, stop_token_ids=[wanted]))
    world.run()
    assert world.detok.tokens["a"] == [wanted]
    assert world.detok.closed["a"].finish_reason == "stop"


def test_a_request_aborted_while_waiting_running_or_in_flight_ends_once_and_frees_its_pages() -> (
    None
):
    world = World(args(max_batch_size=1, prefill_max_batch_size=1, max_running_requests=2))
    world.tell(*(submit(f"r{i}", [9] * 3, 6, ignore_eos=True) for i in range(4)))
    world.tell(abort("r3"))
    assert world.detok.closed["r3"].finish_reason == "abort"
    world.tell(abort("r0"))  # its prefill is in flight
    assert world.scheduler.admission is not None
    assert world.scheduler.admission.pool.num_held > 0, "pages must wait for the steps in flight"
    world.step()
    world.tell(abort("r1"), abort("r1"), abort("unknown"))
    world.run()
    assert {r: c.finish_reason for r, c in world.detok.closed.items()} == {
        "r0": "abort", "r1": "abort", "r2": "length", "r3": "abort",
    }  # fmt: skip


def test_an_empty_id_aborts_all_requests_of_that_client_and_no_other() -> None:
    world = World(args())
    world.tell(submit("a", [9], 6, b"x"), submit("b", [9], 6, b"x"), submit("c", [9], 6, b"y"))
    world.tell(abort("", b"x"))
    assert world.scheduler.info()["running"] == 1
    world.run()
    assert world.scheduler.info()["running"] == 0


def test_a_request_sent_twice_runs_once() -> None:
    world = World(args())
    world.tell(submit("a", [9], 3, ignore_eos=True), submit("a", [9], 3, ignore_eos=True))
    assert world.run() == 3
    assert world.scheduler.info()["ended"] == {"stop": 0, "length": 1, "abort": 0, "error": 0}


def test_over_max_queued_requests_a_request_is_refused_at_once_with_the_limit() -> None:
    world = World(args(max_queued_requests=2, max_running_requests=1))
    world.tell(submit("a", [9], 3))
    world.tell(*(submit(f"q{i}", [9], 3) for i in range(3)))
    refused = world.detok.closed["q2"]
    assert refused.error is not None
    assert refused.error.code == "queue_full"
    assert "--max-queued-requests is 2" in refused.error.message
    world.run()
    assert len(world.detok.closed) == 4


def test_a_request_larger_than_the_whole_pool_is_refused_and_blocks_nobody() -> None:
    world = World(args(), num_pages=4, page_size=4)
    world.tell(submit("big", [9] * 10, 10), submit("small", [9], 2, ignore_eos=True))
    error = world.detok.closed["big"].error
    assert error is not None
    assert "holds 16 tokens" in error.message
    world.run()
    assert world.detok.closed["small"].finish_reason == "length"


def test_requests_wait_for_pages_and_all_are_served() -> None:
    world = World(args(), num_pages=4, page_size=4)
    world.tell(*(submit(f"r{i}", [9] * 5, 8, ignore_eos=True) for i in range(6)))
    world.run()
    assert len(world.detok.closed) == 6


def test_a_stop_string_found_by_the_detokenizer_ends_the_request() -> None:
    world = World(args())
    world.tell(submit("a", [9], 20, ignore_eos=True))
    world.step()
    world.tell(StopFound([0, 77]))
    world.run()
    assert world.detok.closed["a"].finish_reason == "stop"
    assert len(world.detok.tokens["a"]) < 20


def test_drain_finishes_what_is_there_and_then_stops_worker_and_detokenizer() -> None:
    world = World(args())
    world.tell(submit("a", [9], 5, ignore_eos=True))
    world.tell(Drain())
    assert not world.scheduler.stopped
    world.run()
    assert world.scheduler.stopped and world.worker.stopped and world.detok.stopped
    assert len(world.detok.tokens["a"]) == 5


def test_abort_all_ends_everything_with_its_reason() -> None:
    world = World(args(max_running_requests=1))
    world.tell(submit("a", [9], 5), submit("b", [9], 5))
    world.tell(AbortAll("the server stopped"))
    world.run()
    for closed in world.detok.closed.values():
        assert closed.finish_reason == "abort"
        assert closed.error is not None
        assert closed.error.message == "the server stopped"


def test_an_idle_scheduler_has_every_page_back_and_every_slot_free() -> None:
    world = World(args(max_batch_size=3, max_running_requests=4), num_pages=16)
    world.tell(*(submit(f"r{i}", [9] * (1 + i), 5) for i in range(12)))
    world.run()
    info = world.scheduler.info()
    assert info["pages_free"] == info["pages_total"] == 16
    assert info["running"] == info["waiting"] == 0
    assert Status.FINISHED > Status.DECODING > Status.PREFILLING > Status.WAITING
