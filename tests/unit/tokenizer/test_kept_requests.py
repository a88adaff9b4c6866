"""Requests with keep_s outlive the connection of their client; others do not."""

from typing import Any

from quadriga.sampling.params import SamplingParams
from quadriga.wire.to_scheduler import CLIENT_LOST, AbortRequest, Submit
from tokenizer_proc.replicas.open_requests import OpenRequests

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


def make(**keep_s: float | None) -> tuple[OpenRequests, Sent]:
    """Return open requests of one client, by their ids, and what the scheduler gets."""
    sent = Sent()
    requests = OpenRequests(sent)  # type: ignore[arg-type]
    for request_id, seconds in keep_s.items():
        requests.submit(submit(request_id), "", seconds)
    return requests, sent


def test_a_lost_client_keeps_the_requests_that_say_so() -> None:
    requests, sent = make(plain=None, kept=60.0)
    lost = requests.lose_client(CLIENT)
    assert sent.aborted == ["plain"]
    assert [request.submit.request_id for request in lost.ended] == ["plain"]
    assert [request.submit.request_id for request in lost.kept] == ["kept"]
    assert len(requests) == 1


def test_a_lost_client_without_kept_requests_loses_all_at_once() -> None:
    requests, sent = make(one=None, two=None)
    assert len(requests.lose_client(CLIENT).ended) == 2
    assert sent.aborted == [""]
    assert not requests.of_client(CLIENT)


def test_a_kept_request_ends_once_unless_its_client_has_come_back() -> None:
    requests, sent = make(gone=60.0, back=60.0)
    gone, back = requests.lose_client(CLIENT).kept
    requests.submit(submit("back", resent=True), "", 60.0)
    assert not requests.end(back, CLIENT_LOST)
    assert requests.end(gone, CLIENT_LOST)
    assert not requests.end(gone, CLIENT_LOST)
    assert sent.aborted == ["gone"]


def test_a_kept_request_is_sent_to_a_new_scheduler() -> None:
    requests, sent = make(plain=None, kept=60.0)
    requests.lose_client(CLIENT)
    sent.messages.clear()
    requests.resend_all()
    assert [each.request_id for each in sent.messages if isinstance(each, Submit)] == ["kept"]
