"""Write what a version of the server leaves on disk when it is killed at work.

    python -m tests.old_data CHECKOUT tests/fixtures/version_X_Y_Z

CHECKOUT is a worktree of that version. The directory must have `model`: configuration and tokenizer
of a model, whose weights are made of a fixed seed. `journal`, with the data of the gateway below,
and `ids.json` are added. tests/integration/test_upgrade.py starts this version on it.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from bench.client.server import free_port
from tests.waiting import wait_until

MODEL = "tiny"
STREAM = {"prompt": "fox", "max_tokens": 150, "temperature": 0, "ignore_eos": True, "stream": True,
          "resumable": True}  # fmt: skip
LINE = {"custom_id": "line", "method": "POST", "url": "/v1/completions",
        "body": {"model": MODEL, "prompt": "a", "max_tokens": 5, "temperature": 0}}  # fmt: skip
NUM_LINES = 3
LONG = {"input": "Tell me more", "max_output_tokens": 150, "temperature": 0, "background": True}


def flags(model: Path, journal: Path, port: int) -> list[str]:
    """Return the flags of the server that writes the data, and of the one that reads it."""
    return ["--model", str(model), "--load-format", "dummy", "--dtype", "float32",
            "--served-model-name", MODEL, "--worker-threads", "1", "--max-total-tokens", "4096",
            "--port", str(port), "--journal", str(journal)]  # fmt: skip


class Gateway:
    """Requests to a gateway.

    Attributes:
        headers: headers of every request, such as a key.
    """

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.headers: dict[str, str] = {}

    def ask(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        """Return the JSON of an answer."""
        return json.loads(self.read(path, body, headers))

    def read(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> bytes:
        """Return the bytes of an answer. body: an object, or bytes as they are."""
        with self.open(path, body, headers) as answer:
            return bytes(answer.read())

    def open(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self.headers | (headers or {}))
        return urllib.request.urlopen(request, timeout=60)

    def upload(self, content: bytes) -> str:
        """Return the id of a new file."""
        body = (
            b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            b'--b\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
            + content + b"\r\n--b--\r\n"
        )  # fmt: skip
        kind = {"Content-Type": "multipart/form-data; boundary=b"}
        return str(self.ask("/v1/files", body, kind)["id"])

    def batch(self, file: str) -> dict[str, Any]:
        """Make a batch of a file."""
        body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        return dict(self.ask("/v1/batches", body))


def _work(gateway: Gateway, stop_the_worker: Any) -> dict[str, Any]:
    """Leave something of each kind, some of it open; return ids and what was seen."""
    lines = "".join(json.dumps(LINE | {"custom_id": f"line-{n}"}) + "\n" for n in range(NUM_LINES))
    file = gateway.upload(lines.encode())
    batch = gateway.batch(file)["id"]
    wait_until(lambda: gateway.ask(f"/v1/batches/{batch}")["status"] == "completed", 60)
    response = gateway.ask("/v1/responses", {"input": "Hi", "max_output_tokens": 8})
    conversation = gateway.ask("/v1/conversations", {"metadata": {"topic": "foxes"}})["id"]
    gateway.ask(
        "/v1/responses", {"input": "Hello", "max_output_tokens": 8, "conversation": conversation}
    )
    seen = b""
    with gateway.open("/v1/completions", STREAM, {"X-Request-Id": "fox-1"}) as stream:
        while seen.count(b"\n\n") < 5:
            seen += stream.readline()
        stop_the_worker()
        background = gateway.ask("/v1/responses", LONG)["id"]
        open_batch = gateway.batch(file)["id"]
    return {
        "file": file, "file_content": lines, "batch": batch, "open_batch": open_batch,
        "response": response["id"], "response_output": response["output"],
        "conversation": conversation, "background": background, "stream": "fox-1",
        "stream_begin": seen.decode(),
    }  # fmt: skip


def main(checkout: Path, directory: Path) -> None:
    """Run a server of the checkout, let it work, and kill it."""
    journal, port = directory / "journal", free_port()
    shutil.rmtree(journal, ignore_errors=True)
    log = (directory / "log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "launcher.py", *flags(directory / "model", journal, port),
         "--endpoint", f"tcp://127.0.0.1:{free_port()}"],
        cwd=checkout, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(checkout)},
    )  # fmt: skip
    family: list[psutil.Process] = []
    try:
        wait_until(lambda: b"quadriga ready" in (directory / "log").read_bytes(), 90)
        family = psutil.Process(process.pid).children(recursive=True)
        (worker,) = [child for child in family if "worker_proc" in child.cmdline()]
        found = _work(Gateway(port), lambda: worker.send_signal(signal.SIGSTOP))
    finally:
        for child in (psutil.Process(process.pid), *family):
            child.kill()
        process.wait(10)
        log.close()
        (directory / "log").unlink()
    (directory / "ids.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
