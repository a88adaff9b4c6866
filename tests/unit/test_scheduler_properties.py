"""Random arrivals, lengths, aborts and tiny pools: nothing is lost, nothing ends twice."""

from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.config import SchedulerArgs
from tests.unit.simulation import World, abort, reference, submit

requests = st.tuples(
    st.lists(st.integers(3, 99), min_size=1, max_size=12), st.integers(1, 12), st.booleans()
)
events = st.lists(
    st.one_of(requests, st.integers(0, 40).map(lambda n: ("abort", n)), st.just("step")),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(
    events,
    st.integers(1, 5),
    st.one_of(st.none(), st.integers(1, 5)),
    st.integers(1, 6),
    st.integers(1, 20),
    st.integers(3, 12),
    st.integers(1, 8),
)
def test_each_request_ends_once_with_the_reference_tokens_and_all_pages_come_back(
    events, width, prefill_width, running, budget, num_pages, page_size
) -> None:
    world = World(
        SchedulerArgs(
            max_batch_size=width,
            prefill_max_batch_size=prefill_width,
            max_running_requests=running,
            prefill_max_tokens=budget,
        ),
        num_pages,
        page_size,
    )
    asked = {}
    for event in events:
        if event == "step":
            world.step()
        elif event[0] == "abort":
            world.tell(abort(f"r{event[1]}"))
        else:
            asked[f"r{len(asked)}"] = event
            prompt, max_new_tokens, ignore_eos = event
            name = f"r{len(asked) - 1}"
            world.tell(submit(name, prompt, max_new_tokens, ignore_eos=ignore_eos))
    world.run()
    assert world.detok.closed.keys() == asked.keys()
    for name, (prompt, max_new_tokens, ignore_eos) in asked.items():
        closed, tokens = world.detok.closed[name], world.detok.tokens.get(name, [])
        expected = reference(prompt, max_new_tokens, ignore_eos)
        if closed.finish_reason == "abort":
            assert tokens == expected[: len(tokens)]
        elif closed.finish_reason == "error":
            assert len(prompt) + max_new_tokens - 1 > num_pages * page_size
        else:
            assert tokens == expected
    info = world.scheduler.info()
    assert info["pages_free"] == num_pages
    assert info["running"] == info["waiting"] == 0
