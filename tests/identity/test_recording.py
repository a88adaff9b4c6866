"""The tool that compares the answers of two commits finds what differs, and nothing else."""

import re

import pytest

from tests.identity.http_requests import Call, all_calls
from tests.identity.recording import GOLDEN, difference, read
from tests.identity.servers import Answer
from tests.identity.written_form import Hider, written


def recorded(body: str, content_type: str = "application/json", shape: bool = False) -> str:
    """Return the recording of two answers, the second of which has this body."""
    hider, blocks = Hider(), []
    for name, data in (("a/first", '{"id":"resp_' + "0a" * 16 + '"}'), ("a/second", body)):
        headers = [("Date", "now"), ("Content-Type", content_type)]
        answer = Answer("200 OK", headers, data.encode())
        call = Call(name, "GET /x", shape=shape and name == "a/second")
        blocks.append(written(call, answer, hider, {":8000": ":<port>"}))
    return "\n".join(blocks)


def changed(before: str, after: str, shape: bool = False) -> str:
    return difference(recorded(before, shape=shape), recorded(after, shape=shape))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"a":1,"b":2}', '{"b":2,"a":1}'),
        ('{"a":1}', '{"a": 1}'),
        ('{"a":1}', '{"a":1.0}'),
        ('{"a":null}', "{}"),
        ('{"created":1}', '{"created":1.5}'),
        ('{"created":1}', '{"created":null}'),
        ('{"of":"resp_' + "0a" * 16 + '"}', '{"of":"resp_' + "0b" * 16 + '"}'),
        ('{"x":"http://127.0.0.1:8000"}', '{"x":"http://localhost:8000"}'),
    ],
)
def test_a_changed_answer_is_found(before: str, after: str) -> None:
    assert re.findall("^=== (.*)$", changed(before, after), re.M) == ["main: a/second"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"created":1,"decode_ms":1.5}', '{"created":2,"decode_ms":3.25}'),
        ('{"id":"' + "1a" * 16 + '"}', '{"id":"' + "2b" * 16 + '"}'),
        ('{"id":"Ab3dEf6hI"}', '{"id":"zzzzzzzz9"}'),
        ('{"at":"2026-01-01T00:00:00Z"}', '{"at":"2027-02-03T04:05:06Z"}'),
    ],
)
def test_ids_and_times_are_no_difference(before: str, after: str) -> None:
    assert changed(before, after) == ""


def test_an_id_stands_for_the_same_thing_in_all_answers() -> None:
    other = "0b" * 16
    first = recorded(f'{{"a":"{other}","b":"{other}"}}')
    assert first.count("<a/second 1>") == 2 and "<a/first 1>" in first
    assert changed(f'{{"a":"{other}","b":"{other}"}}', f'{{"a":"{other}","b":"{"0c" * 16}"}}')


def test_events_are_compared_by_their_fields_and_comments_not_at_all() -> None:
    def stream(*events: str) -> str:
        return recorded("".join(f"{each}\n\n" for each in events), "text/event-stream")

    plain = stream("event: a\ndata: {}", "data: [DONE]")
    assert difference(plain, stream(": queued 1", "event: a\ndata: {}", "data: [DONE]")) == ""
    assert difference(plain, stream("data: {}\nevent: a", "data: [DONE]"))
    assert difference(plain, stream("event: a\ndata: {}"))


def test_a_shape_has_names_and_types_but_no_numbers() -> None:
    def is_same(before: str, after: str) -> bool:
        return changed(before, after, shape=True) == ""

    before, after = '[{"n":1,"x":[]}]', '[{"n":2,"x":[5]},{"n":1,"x":null}]'
    assert is_same(f'{{"a":[1,2],"b":{before}}}', f'{{"a":[],"b":{after}}}')
    assert not is_same('{"a":1,"b":2}', '{"b":2,"a":1}')
    assert not is_same('{"a":[{"name":"x"}]}', '{"a":[{"name":"x"},{"name":"y"}]}')


def test_a_lost_answer_and_another_order_are_found() -> None:
    text = recorded("{}")
    blocks = re.split(r"(?=^=== )", text, flags=re.M)[1:]
    assert difference(text, blocks[0]) == "=== main: a/second: only before"
    assert difference(text, "".join(blocks[::-1])) == "the order of the calls differs"


def test_a_long_line_is_shown_where_it_differs() -> None:
    body = '{"text":"' + "a" * 5000 + 'B"}'
    lines = changed(body, body.replace("B", "C")).splitlines()
    assert max(map(len, lines)) < 400
    assert [line[-3:] for line in lines[-2:]] == ['B"}', 'C"}']


def test_what_varies_in_one_place_is_compared_in_all_others() -> None:
    hidden = Hider().hide("wait 5 of 7", "a", {}, (r"wait (\d+)",))
    assert hidden == "wait <varies> of 7"


def test_the_committed_recording_has_every_request() -> None:
    names = [f"{call.server}: {call.name}" for call in all_calls()]
    assert len(set(names)) == len(names)
    assert sorted(re.findall(r"^=== (.*)$", read(GOLDEN), re.M)) == sorted(names)
