"""What the measurement of a start reads from a server's log, and its table."""

from bench.start import StartTimes, columns_of, phases_of
from bench.turns import Turns

LOG = """
19:20:04 worker_proc DEBUG starting as process 14103
19:21:24 launcher INFO   launcher: find model 0.1 s
19:21:24 launcher INFO   worker_proc: import torch 3.4 s, make the KV pool 1.2 s, warm up 0.3 s
19:21:24 launcher INFO   detok_proc: load tokenizer 0.6 s
19:21:24 launcher INFO quadriga ready in 8.4 s · smollm2-135m bfloat16 cpu
"""


def test_the_phases_of_every_process_are_read() -> None:
    assert phases_of(LOG) == {
        "find model": 0.1,
        "import torch": 3.4,
        "make the KV pool": 1.2,
        "warm up": 0.3,
        "load tokenizer": 0.6,
    }


def test_a_row_is_the_median_of_the_starts() -> None:
    turns: Turns[StartTimes] = Turns(["this"])
    turns.results["this"] = [
        StartTimes(ready, ready + 1, {"launcher": 0.25, "worker_proc": ready}, {"warm up": ready})
        for ready in (4.0, 2.0, 3.0)
    ]
    lines = turns.table(columns_of(turns.results["this"][0])).splitlines()[2:]
    assert lines == [
        "| to the ready line | 3000 |",
        "| to the first token | 4000 |",
        "| CPU of all processes | 3250 |",
        "| CPU of launcher | 250 |",
        "| CPU of worker_proc | 3000 |",
        "| warm up | 3000 |",
    ]
