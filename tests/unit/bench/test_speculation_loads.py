"""The loads of bench.speculation."""

import pytest

from bench.speculation import LOADS, tasks_of


@pytest.mark.parametrize("load", LOADS)
def test_a_load_is_the_same_for_a_seed_and_differs_between_seeds(load: str) -> None:
    tasks = tasks_of(load, 3, 1, 16)
    assert tasks == tasks_of(load, 3, 1, 16)
    assert len({task.question for task in [*tasks, *tasks_of(load, 3, 2, 16)]}) > 3
    assert all(task.params.max_new_tokens == 16 for task in tasks)
