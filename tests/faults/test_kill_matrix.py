"""A part of the kill matrix; the whole is python -m tests.faults.kill_matrix."""

from tests.faults.kill_matrix import main


def test_a_process_killed_while_the_server_loads_or_stops_costs_nothing() -> None:
    flags = ["--rounds", "1", "--signals", "SIGKILL", "--moments", "loading", "draining"]
    assert main([*flags, "--processes", "scheduler_proc"]) == 0
