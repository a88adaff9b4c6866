"""Workers of a parallel test run share out the CPUs."""

import os
import threading

import pytest

from tests.cpu_shares import ALL_CPUS, all_cpus, share


@pytest.mark.parametrize(
    ("cpus", "shares"),
    [
        ([0, 1], [[0], [1]]),
        ([0, 1, 2, 3, 5], [[0, 1], [2, 3, 5]]),
        ([4, 6], [[4], [6], [4], [6], [4]]),
        ([3], [[3], [3]]),
    ],
)
def test_each_worker_has_cpus_of_its_own_as_far_as_they_go(
    cpus: list[int], shares: list[list[int]]
) -> None:
    count = len(shares)
    assert [share(cpus, worker, count) for worker in range(count)] == shares


@pytest.mark.skipif(not ALL_CPUS, reason="this system pins no process to CPUs")
def test_a_test_may_have_all_cpus_for_a_while_with_every_thread() -> None:
    def allowed() -> set[frozenset[int]]:
        ids = (threading.get_native_id(), thread.native_id)
        return {frozenset(os.sched_getaffinity(number or 0)) for number in ids}

    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        before = frozenset(os.sched_getaffinity(0))
        with all_cpus():
            assert allowed() == {frozenset(ALL_CPUS)}
        assert allowed() == {before}
    finally:
        end.set()
        thread.join()
