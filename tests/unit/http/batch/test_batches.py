"""Files and batches by HTTP, before a scripted ring."""

import asyncio
import fcntl
import json
import os
import shutil
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from http_proc.jobs import batches
from http_proc.jobs.batch_job import BatchJob, LineGate
from quadriga import disk
from quadriga.errors import QueueFull
from quadriga.server.config.server_config import ServerConfig
from tests.unit.http.batch.batch_client import CHAT, http_before, ids, input_file, ring
from tests.unit.scripted_ring import ScriptedHandle, ScriptedRing
from tests.unit.vector_ring import ScoreRing, VectorRing

EMBEDDINGS = "/v1/embeddings"


class StallingRing(ScriptedRing):
    """A ring that answers so many requests and leaves the others open."""

    num_answers = 5

    def _answer(self, handle: ScriptedHandle, sink: Any) -> None:
        self.leaves_open = len(self.handles) > self.num_answers
        super()._answer(handle, sink)


async def test_a_file_is_kept_listed_and_deleted(tmp_path: Path) -> None:
    async with http_before(ring(), data_dir=str(tmp_path)) as http:
        status, file = await http.upload(b"one\ntwo")
        assert (status, file["bytes"], file["filename"]) == (200, 7, "in.jsonl")
    assert {path.stat().st_mode & 0o77 for path in tmp_path.rglob("*")} == {0}
    async with http_before(ring(), data_dir=str(tmp_path)) as http:
        _, files = await http.call("get", "/v1/files")
        (file,) = files["data"]
        assert await http.content(file["id"]) == b"one\ntwo"
        path = f"/v1/files/{file['id']}"
        assert await http.call("get", path) == (200, file)
        assert (await http.call("delete", path))[1]["deleted"]
        for method, of in (("get", path), ("delete", path), ("get", f"{path}/content")):
            assert (await http.call(method, of))[0] == 404
        assert list((tmp_path / "files").iterdir()) == []


@pytest.mark.parametrize("name", [b"a\xff.jsonl", b"\xed\xa0\x80", b"b" * 5000])
async def test_a_file_name_of_any_bytes_is_kept_as_text(tmp_path: Path, name: bytes) -> None:
    head = b'--X\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--X\r\n'
    head += b'Content-Disposition: form-data; name="file"; filename="' + name + b'"\r\n\r\n'
    form = {"Content-Type": "multipart/form-data; boundary=X"}
    async with http_before(ring(), data_dir=str(tmp_path)) as http:
        data = head + b"x\r\n--X--\r\n"
        status, file = await http.call("post", "/v1/files", data=data, headers=form)
        assert status == 200 and 0 < len(file["filename"]) <= 255
        assert (await http.call("get", "/v1/files"))[1]["data"][0] == file


@pytest.mark.parametrize("limit", ["0" * 5000, "0" * 3000 + "1" * 3000, "9" * 5000, "0", "-1"])
async def test_a_limit_of_any_length_that_is_out_of_range_is_refused(
    tmp_path: Path, limit: str
) -> None:
    async with http_before(ring(), data_dir=str(tmp_path)) as http:
        status, answer = await http.call("get", f"/v1/files?limit={limit}")
        assert status == 400 and "it must be from 1 to" in answer["error"]["message"]


async def test_uploads_over_a_limit_or_of_another_form_are_refused_and_leave_nothing(
    tmp_path: Path,
) -> None:
    async with http_before(
        ring(), data_dir=str(tmp_path), max_file_bytes=100, max_files_bytes=150
    ) as http:
        assert (await http.upload(b"x" * 101))[0] == 413
        assert (await http.upload(b"x" * 200_000))[0] == 413
        assert (await http.upload(b"x", purpose="vision"))[0] == 400
        assert (await http.upload(b"x" * 90))[0] == 200
        assert (await http.upload(b"x" * 90))[0] == 507
        assert (await http.call("post", "/v1/files", json={}))[0] == 400
        broken = {"Content-Type": "multipart/form-data; boundary=x"}
        assert (await http.call("post", "/v1/files", data=b"--x\r\nno", headers=broken))[0] == 400
        status, answer = await http.call("post", "/v1/files", data=b"", headers=broken)
        assert status == 400, answer
        assert len(list((tmp_path / "files").iterdir())) == 2


async def test_without_a_directory_the_endpoints_say_what_they_need() -> None:
    async with http_before(ring()) as http:
        for path in ("/v1/files", "/v1/batches"):
            status, answer = await http.call("get", path)
            assert status == 501 and "--no-store" in answer["error"]["message"]


async def test_a_batch_answers_each_line_once(tmp_path: Path) -> None:
    scripted = ring()
    async with http_before(scripted, data_dir=str(tmp_path)) as http:
        batch = await http.start(input_file(40), metadata={"a": "b"})
        batch = await http.until(batch, "completed", "failed")
        assert batch["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
        assert batch["error_file_id"] is None and batch["metadata"] == {"a": "b"}
        data = await http.content(batch["output_file_id"])
        assert ids(data) == Counter(f"line-{number}" for number in range(40))
        line = json.loads(data.splitlines()[0])
        assert line["response"]["body"]["choices"][0]["message"]["content"] == "Hello"
        assert {options["priority"] for _, _, options in scripted.submitted} == {-1000}
        _, found = await http.call("get", "/v1/batches?limit=1")
        assert found["data"][0]["id"] == batch["id"] and not found["has_more"]
        status, answer = await http.call("post", f"/v1/batches/{batch['id']}/cancel")
        assert status == 409 and "completed" in answer["error"]["message"]
        scripted.facts["ready"] = False  # without the metrics of the ring
        async with http.session.get(f"{http.url}/metrics") as metrics:
            text = await metrics.text()
        assert 'batches{model_name="tiny",status="completed"} 1.0' in text
        assert 'batch_lines_total{model_name="tiny",outcome="completed"} 40.0' in text


async def test_what_the_endpoint_refuses_is_a_line_of_the_error_file(tmp_path: Path) -> None:
    async with http_before(ring(), data_dir=str(tmp_path)) as http:
        data = input_file(1, model="other") + b"\n" + input_file(3).partition(b"\n")[2]
        batch = await http.until(await http.start(data), "completed", "failed")
        assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        (line,) = (await http.content(batch["error_file_id"])).splitlines()
        response = json.loads(line)["response"]
        assert response["status_code"] == 404
        assert response["body"]["error"]["code"] == "model_not_found"


async def test_a_broken_file_fails_the_batch_with_the_lines(tmp_path: Path) -> None:
    async with http_before(ring(), data_dir=str(tmp_path)) as http:
        data = input_file(2) + b"\n{\n" + input_file(1)
        batch = await http.until(await http.start(data), "completed", "failed")
        assert batch["status"] == "failed"
        errors = [(error["code"], error["line"]) for error in batch["errors"]["data"]]
        assert errors == [("invalid_json_line", 3), ("duplicate_custom_id", 4)]


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"endpoint": "/v1/images/generations"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"input_file_id": "file-../../x"}, 404, "input_file_id"),
        ({"metadata": {"a": "b" * 513}}, 400, "metadata"),
        ({"metadata": {str(number): "" for number in range(17)}}, 400, "metadata"),
        ({"output_expires_after": {"seconds": 1}}, 400, "output_expires_after"),
    ],
)
async def test_a_bad_request_for_a_batch_names_its_field(
    tmp_path: Path, changes: Any, status: int, param: str
) -> None:
    async with http_before(ring(), data_dir=str(tmp_path)) as http:
        _, file = await http.upload(input_file(1))
        body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
        answer = await http.call("post", "/v1/batches", json={**body, **changes})
        assert (answer[0], answer[1]["error"]["param"]) == (status, param)


async def test_lines_may_ask_for_vectors(tmp_path: Path) -> None:
    lines = [
        {"custom_id": f"line-{number}", "method": "POST", "url": EMBEDDINGS,
         "body": {"model": "tiny", "input": ["a" * number, "b"]}}
        for number in range(1, 4)
    ]  # fmt: skip
    scripted = VectorRing()
    scripted.facts |= {"running": 0, "waiting": 0}
    async with http_before(scripted, data_dir=str(tmp_path)) as http:
        data = b"\n".join(json.dumps(line).encode() for line in lines)
        batch = await http.until(await http.start(data, endpoint=EMBEDDINGS), "completed")
        content = await http.content(batch["output_file_id"])
    answers = {
        each["custom_id"]: each["response"]["body"]
        for each in map(json.loads, content.splitlines())
    }
    firsts = {name: body["data"][0]["embedding"][0] for name, body in answers.items()}
    assert firsts == {"line-1": 1.0, "line-2": 2.0, "line-3": 3.0}
    assert {options["priority"] for _, _, options in scripted.submitted} == {-1000}


async def test_lines_may_rank_documents(tmp_path: Path) -> None:
    line = {"custom_id": "one", "method": "POST", "url": "/v1/rerank",
            "body": {"model": "tiny", "query": "q", "documents": ["a", "bbb", "cc"]}}  # fmt: skip
    scripted = ScoreRing("LABEL_0")
    scripted.facts |= {"running": 0, "waiting": 0}
    async with http_before(scripted, data_dir=str(tmp_path)) as http:
        started = await http.start(json.dumps(line).encode(), endpoint="/v1/rerank")
        batch = await http.until(started, "completed")
        content = await http.content(batch["output_file_id"])
    (answer,) = map(json.loads, content.splitlines())
    assert [each["index"] for each in answer["response"]["body"]["results"]] == [1, 2, 0]
    assert {options["priority"] for _, _, options in scripted.submitted} == {-1000}


async def test_a_batch_that_is_interrupted_goes_on_at_the_next_start(tmp_path: Path) -> None:
    scripted = StallingRing(["Hi"], running=0, waiting=0)
    line_ids: list[dict[str, str]] = []
    data = tmp_path / "data"
    async with http_before(scripted, data_dir=str(data), batch_concurrency=4) as http:
        batch = await http.start(input_file(20))
        while batch["request_counts"]["completed"] < 5:
            await asyncio.sleep(0.005)
            _, batch = await http.call("get", f"/v1/batches/{batch['id']}")
        assert batch["status"] == "in_progress"
        status, _ = await http.call("delete", f"/v1/files/{batch['input_file_id']}")
        assert status == 409
    assert all(handle.done for handle in scripted.handles), "no request goes on without its batch"
    shutil.copytree(data, tmp_path / "copy")
    for directory in (data, tmp_path / "copy"):
        async with http_before(ring(), data_dir=str(directory)) as http:
            _, found = await http.call("get", "/v1/batches")
            batch = await http.until(found["data"][0], "completed")
            output = await http.content(batch["output_file_id"])
            assert ids(output) == Counter(f"line-{number}" for number in range(20))
            assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
            lines = map(json.loads, output.splitlines())
            line_ids.append({line["custom_id"]: line["id"] for line in lines})
    assert line_ids[0] == line_ids[1], "a line that is answered again has another id"
    assert len(set(line_ids[0].values())) == 20


async def test_a_cancelled_batch_keeps_its_answers(tmp_path: Path) -> None:
    scripted = StallingRing(["Hi"], running=0, waiting=0)
    async with http_before(scripted, data_dir=str(tmp_path), batch_concurrency=2) as http:
        batch = await http.start(input_file(20))
        while batch["request_counts"]["completed"] < 5:
            await asyncio.sleep(0.005)
            _, batch = await http.call("get", f"/v1/batches/{batch['id']}")
        status, batch = await http.call("post", f"/v1/batches/{batch['id']}/cancel")
        assert (status, batch["status"]) == (200, "cancelling")
        batch = await http.until(batch, "cancelled")
        data = await http.content(batch["output_file_id"])
        assert len(ids(data)) == batch["request_counts"]["completed"] == 5
        assert all(handle.done for handle in scripted.handles)


async def test_lines_without_an_answer_at_the_end_of_the_window_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "WINDOW_S", 1)
    scripted = ring()
    scripted.leaves_open = True
    async with http_before(scripted, data_dir=str(tmp_path)) as http:
        batch = await http.until(await http.start(input_file(5)), "expired")
        assert batch["request_counts"] == {"total": 5, "completed": 0, "failed": 5}
        lines = (await http.content(batch["error_file_id"])).splitlines()
        assert {json.loads(line)["error"]["code"] for line in lines} == {"batch_expired"}
        assert len(ids(b"\n".join(lines))) == 5


@pytest.mark.parametrize("num_turns", range(4))
async def test_a_line_that_is_cancelled_as_another_ends_is_not_admitted(num_turns: int) -> None:
    """Cancel the waiting line `num_turns` turns of the event loop after the release."""

    async def idle() -> dict[str, Any]:
        return {"ready": True, "running": 0, "waiting": 0}

    gateway: Any = SimpleNamespace(
        args=SimpleNamespace(batch_concurrency=1),
        num_open_of=lambda _: 0,
        num_choices_of=lambda _: 0,
    )
    model: Any = SimpleNamespace(
        config=ServerConfig().replace(batch_concurrency_beside=0),
        server_info=SimpleNamespace(current=idle),
    )
    gate = LineGate(gateway, model)
    await gate.acquire()
    waiting = asyncio.create_task(gate.acquire())
    await asyncio.sleep(0.01)
    gate.release()
    for _ in range(num_turns):
        await asyncio.sleep(0)
    was_cancelled = waiting.cancel()  # False: the line was admitted before
    await asyncio.wait([waiting])
    assert waiting.cancelled() == was_cancelled
    assert gate.num_running == (not was_cancelled)


async def test_a_full_queue_is_waited_for(tmp_path: Path) -> None:
    scripted = ring()
    scripted.error = QueueFull("full")
    async with http_before(scripted, data_dir=str(tmp_path)) as http:
        batch = await http.start(input_file(2))
        while not scripted.handles:
            await asyncio.sleep(0.01)
        scripted.error = None
        batch = await http.until(batch, "completed")
        assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}


@pytest.mark.parametrize(
    ("load", "beside", "expected"),
    [
        ({"running": 0, "waiting": 0}, 1, 3),
        ({"running": 9, "waiting": 0}, 1, 1),
        ({"running": 9, "waiting": 0}, 0, 0),
        ({"running": 9, "waiting": 2}, 1, 0),
        ({"running": 64, "waiting": 0}, 1, 0),
        ({"ready": False}, 1, 0),
    ],
)
async def test_lines_run_as_the_load_allows(
    tmp_path: Path, load: dict[str, Any], beside: int, expected: int
) -> None:
    scripted = ring(**load)
    scripted.leaves_open = True

    flags = {"batch_concurrency": 3, "batch_concurrency_beside": beside}
    async with http_before(scripted, data_dir=str(tmp_path), **flags) as http:
        batch = await http.until(await http.start(input_file(9)), "in_progress")
        await asyncio.sleep(0.6)  # more than two samples of the load
        assert len(scripted.handles) == expected
        _, batch = await http.call("post", f"/v1/batches/{batch['id']}/cancel")
        await http.until(batch, "cancelled")


async def test_the_directory_may_be_that_of_the_journal_too(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(fd, fcntl.LOCK_EX)  # as the scheduler locks the directory of its journal
    try:
        async with http_before(ring(), data_dir=str(tmp_path)) as http:
            assert (await http.call("get", "/v1/batches"))[0] == 200
    finally:
        os.close(fd)


async def test_a_second_gateway_of_a_directory_is_refused_until_the_first_is_gone(
    tmp_path: Path,
) -> None:
    for _ in range(2):
        async with http_before(ring(), data_dir=str(tmp_path)) as first:
            async with http_before(ring(), data_dir=str(tmp_path)) as second:
                status, answer = await second.call("get", "/v1/batches")
                assert status == 503 and "another server" in answer["error"]["message"]
            assert (await first.call("get", "/v1/batches"))[0] == 200


class HeldSave:
    """A replacement of disk.replace that can hold the writes of one status of a batch.

    Attributes:
        began: a write is held.
        goes_on: no write is held any more.
        written: the statuses in the order in which they came to the disk.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, status: str) -> None:
        self.began, self.goes_on = threading.Event(), threading.Event()
        self.written: list[str] = []
        self._status, self._replace = status, disk.replace
        monkeypatch.setattr(disk, "replace", self._held)

    def _held(self, path: Path, data: bytes) -> None:
        status = json.loads(data).get("batch", {}).get("status")
        if status == self._status:
            self.began.set()
            assert self.goes_on.wait(30)
        self._replace(path, data)
        self.written += [status] if status else []


async def test_a_save_that_began_before_a_cancellation_does_not_undo_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = HeldSave(monkeypatch, "in_progress")
    async with http_before(
        StallingRing(["Hi"], running=0, waiting=0), data_dir=str(tmp_path)
    ) as http:
        batch = await http.start(input_file(20))
        assert await asyncio.to_thread(save.began.wait, 30)
        threading.Timer(0.2, save.goes_on.set).start()  # the cancellation waits for the save
        status, batch = await http.call("post", f"/v1/batches/{batch['id']}/cancel")
        assert (status, batch["status"]) == (200, "cancelling")
        await http.until(batch, "cancelled")
        assert save.written == ["validating", "in_progress", "cancelling", "cancelled"]


async def test_a_batch_whose_end_is_being_saved_cannot_be_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = HeldSave(monkeypatch, "failed")
    async with http_before(ring(), data_dir=str(tmp_path)) as http:
        batch = await http.start(b"no JSON")
        assert await asyncio.to_thread(save.began.wait, 30)
        status, body = await http.call("post", f"/v1/batches/{batch['id']}/cancel")
        save.goes_on.set()
        assert (status, body["error"]["code"]) == (409, "batch_ended")
        assert "is failed" in body["error"]["message"]
        await http.until(batch, "failed")


async def test_a_batch_that_is_cancelled_as_its_last_line_ends_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_lines, has_run, goes_on = BatchJob._run_lines, asyncio.Event(), asyncio.Event()

    async def held(job: BatchJob) -> Any:
        outcome = await run_lines(job)
        has_run.set()
        await goes_on.wait()
        return outcome

    monkeypatch.setattr(BatchJob, "_run_lines", held)
    async with http_before(ring(), data_dir=str(tmp_path)) as http:
        batch = await http.start(input_file(2))
        await has_run.wait()
        status, _ = await http.call("post", f"/v1/batches/{batch['id']}/cancel")
        goes_on.set()
        batch = await http.until(batch, "cancelled", "completed")
        assert (status, batch["status"], batch["completed_at"]) == (200, "cancelled", None)
        assert batch["request_counts"]["completed"] == 2


async def test_a_cancellation_that_the_disk_refuses_can_be_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, is_full = disk.replace, True

    def refuse(path: Path, data: bytes) -> None:
        if is_full and b'"cancelling"' in data:
            raise OSError("no")
        replace(path, data)

    monkeypatch.setattr(disk, "replace", refuse)
    async with http_before(
        StallingRing(["Hi"], running=0, waiting=0), data_dir=str(tmp_path)
    ) as http:
        batch = await http.until(await http.start(input_file(20)), "in_progress")
        path = f"/v1/batches/{batch['id']}"
        assert (await http.call("post", f"{path}/cancel"))[0] == 500
        _, batch = await http.call("get", path)
        assert (batch["status"], batch["cancelling_at"]) == ("in_progress", None)
        is_full = False
        assert (await http.call("post", f"{path}/cancel"))[0] == 200
        await http.until(batch, "cancelled")


async def test_states_that_a_crash_has_left_unfinished_are_removed(tmp_path: Path) -> None:
    unfinished = tmp_path / "batches" / "batch_1.json.abc.new"
    unfinished.parent.mkdir()
    unfinished.write_bytes(b"{")
    async with http_before(ring(), data_dir=str(tmp_path)) as http:
        assert (await http.call("get", "/v1/batches"))[0] == 200
        assert not unfinished.exists()
