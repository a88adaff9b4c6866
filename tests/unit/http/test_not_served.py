"""Endpoints of other servers: each 404 says what to do instead."""

import re

import pytest

from http_proc.server import ENDPOINTS
from http_proc.web.request_scope import NOT_SERVED, reason_of
from tests.unit.http.calls import answer_of
from tests.unit.scripted_ring import ScriptedRing

SERVED = {endpoint.path for endpoint in ENDPOINTS}
PATHS = [path for endpoints in NOT_SERVED for path in endpoints.paths]


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("/v1/audio/transcriptions", "Whisper"),
        ("/v1/images/generations", "images and videos are not served"),
        ("/v1/moderations", "POST /v1/decisions"),
        ("/pooling", "POST /v1/embeddings"),
        ("/v1/reranking", "use POST /rerank"),
        ("/v1/fine_tuning/jobs", "--model DIRECTORY"),
        ("/v1/threads/thread_1/messages", "POST /v1/responses"),
        ("/completion", "use POST /v1/completions"),
    ],
)
def test_the_answer_names_the_remedy(path: str, remedy: str) -> None:
    answer = answer_of(ScriptedRing([]), path, {"model": "tiny"})
    assert answer.status == 404
    message = answer.body["error"]["message"]
    assert message.startswith(f"there is no {path} here; ") and remedy in message


def test_a_path_that_no_server_has_leads_to_the_list() -> None:
    answer = answer_of(ScriptedRing([]), "/v1/none", {"model": "tiny"})
    assert answer.body["error"]["message"] == (
        "there is no /v1/none here; /openapi.json lists what there is"
    )


def test_what_is_served_is_not_in_the_list_and_what_a_remedy_names_is_served() -> None:
    assert not [path for path in PATHS if path.rstrip("/") in SERVED]
    assert not [path for path in SERVED if reason_of(path)]
    assert len(PATHS) == len(set(PATHS))
    for endpoints in NOT_SERVED:
        for path in re.findall(r"(?:POST|GET) (/[\w/]+)", endpoints.reason):
            assert path.replace("/ID/", "/{id}/") in SERVED, path
