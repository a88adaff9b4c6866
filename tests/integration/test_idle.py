"""Idle means blocked. QUADRIGA_TEST_IDLE_SECONDS: how long to look."""

import os
import time

import psutil

from tests.server import Server, settle

SECONDS = float(os.environ.get("QUADRIGA_TEST_IDLE_SECONDS", "5"))
MAX_CPU_SECONDS = SECONDS * 0.5 / 60
"""Half a second a minute, for all processes together."""


def test_an_idle_server_takes_no_cpu_time(server: Server) -> None:
    settle(server.endpoint)
    time.sleep(1.0)  # OpenMP's threads spin a little after their last work
    before = cpu_seconds(server)
    time.sleep(SECONDS)
    spent = cpu_seconds(server) - before
    print(f"{spent:.3f} s of CPU time in {SECONDS:g} s")
    assert spent <= MAX_CPU_SECONDS


def cpu_seconds(server: Server) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in server.pids.values()]
    return sum(time.user + time.system for time in times)
