"""Idle means blocked."""

import time

import psutil

from tests.server import Server, settle

SECONDS = 5.0
MOST_CPU_SECONDS = 0.05
"""Half a second a minute, for all processes together."""


def test_an_idle_server_takes_no_cpu_time(server: Server) -> None:
    settle(server.endpoint)
    time.sleep(1.0)  # OpenMP's threads spin a little after their last work
    before = cpu_seconds(server)
    time.sleep(SECONDS)
    assert cpu_seconds(server) - before <= MOST_CPU_SECONDS


def cpu_seconds(server: Server) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in server.pids.values()]
    return sum(time.user + time.system for time in times)
