"""Requests with keep_s outlive the connection of their client; others do not."""

from typing import Any, cast

from quadriga.sampling.params import SamplingParams
from quadriga.server.config.engine_args import IN_TURN
from quadriga.wire.sockets import Outbox
from quadriga.wire.to_scheduler import CLIENT_LOST, AbortRequest, Submit
from tokenizer_proc.replicas.placed import RouterKey
from tokenizer_proc.replicas.replicas import Replicas
from tokenizer_proc.replicas.router import Router

CLIENT = b"client"


class Sent:
    """An Outbox that keeps what is sent."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, message: Any) -> None:
        self.messages.append(message)

    @property
    def aborted(self) -> list[str]:
        return [sent.request_id for sent in self.messages if isinstance(sent, AbortRequest)]


def submit(request_id: str, resent: bool = False) -> Submit:
    params = SamplingParams(max_new_tokens=4)
    return Submit(CLIENT, request_id, b"", params, True, 0.0, 0.0, client_retry=resent)


def make(**keep_s: float | None) -> tuple[Replicas, Sent]:
    """Return a replica with open requests of one client, by their ids, and what it gets."""
    sent = Sent()
    replicas = Replicas(1, Router[RouterKey](IN_TURN, 1, 0, 16, 9), 0, lambda _: None)
    replicas.join(0, cast("Outbox", sent))
    for request_id, seconds in keep_s.items():
        replicas.submit(submit(request_id), "", seconds)
    return replicas, sent


def test_a_lost_client_keeps_the_requests_that_say_so() -> None:
    replicas, sent = make(plain=None, kept=60.0)
    lost = replicas.lose_client(CLIENT)
    assert sent.aborted == ["plain"]
    assert [request.name[1] for request in lost.ended] == ["plain"]
    assert [request.name[1] for request in lost.kept] == ["kept"]
    assert replicas.requests.num_open == 1


def test_a_lost_client_without_kept_requests_loses_all_at_once() -> None:
    replicas, sent = make(one=None, two=None)
    assert len(replicas.lose_client(CLIENT).ended) == 2
    assert sent.aborted == [""]
    assert not replicas.requests.open_of_client(CLIENT)
    assert replicas.requests.was_accepted(CLIENT, "one")


def test_a_kept_request_ends_once_unless_its_client_has_come_back() -> None:
    replicas, sent = make(gone=60.0, back=60.0)
    gone, back = replicas.lose_client(CLIENT).kept
    sent_before = back.submit
    replicas.submit(submit("back", resent=True), "", 60.0)
    assert not replicas.end(back, sent_before, CLIENT_LOST)
    assert replicas.end(gone, gone.submit, CLIENT_LOST)
    assert not replicas.end(gone, gone.submit, CLIENT_LOST)
    assert sent.aborted == ["gone"]
