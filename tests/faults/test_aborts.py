"""Requests aborted and clients killed at random moments: every page, slot and id is released."""

from tests.faults.storm import abort_at_random, kill_clients
from tests.server import Server


def test_a_thousand_requests_aborted_at_random_moments_leave_nothing(server: Server) -> None:
    after = abort_at_random(server.endpoint, 1000, 3.0)
    assert (after["pages_held"], after["open_requests"]) == (0, 0)


def test_two_hundred_clients_killed_in_mid_stream_leave_nothing(server: Server) -> None:
    after = kill_clients(server.endpoint, 200)
    assert (after["pages_held"], after["open_requests"]) == (0, 0)
