"""A server of two tiny models, for tests of several models behind one address."""

import json
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.client.server import free_port
from quadriga import Client, SamplingParams
from tests.server import Server, running_server

FLAGS = ["--dtype", "float32", "--worker-threads", "1", "--max-total-tokens", "4096"]
PROMPT = [5, 6, 7]
NUM_TOKENS = 120
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


class TwoModels:
    """A server of the tiny Llama as `first`, and of the tiny GPT-2 as `second`."""

    def __init__(self, server: Server, port: int) -> None:
        self.server = server
        self.url = f"http://127.0.0.1:{port}"

    def client(self, model: str = "") -> Client:
        return Client(self.server.endpoint, model=model)

    def states(self) -> dict[str, str]:
        with urllib.request.urlopen(f"{self.url}/models", timeout=30) as answer:
            return {model["id"]: model["status"]["value"] for model in json.load(answer)["data"]}

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"{self.url}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def complete(self, **fields: Any) -> Any:
        """Return the answer of /v1/completions, or the body of its error."""
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
        try:
            return self.post("/v1/completions", body)
        except urllib.error.HTTPError as error:
            return json.load(error)

    def get(self, path: str) -> Any:
        """Return the JSON of an address of the gateway."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as answer:
            return json.load(answer)


@contextmanager
def two_models(
    llama: Path, gpt2: Path, *flags: str, second: dict[str, Any] | None = None
) -> Iterator[TwoModels]:
    port = free_port()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        models = {
            "first": {"model": str(llama), "aliases": ["gpt-4o"]},
            "second": {"model": str(gpt2), "max-batch-size": 4, **(second or {})},
        }
        (directory / "models.yaml").write_text(json.dumps(models))
        named = ["--models", str(directory / "models.yaml"), "--port", str(port)]
        endpoint = f"ipc://{directory}/zmq"
        with running_server(directory / "log", *named, *FLAGS, *flags, endpoint=endpoint) as server:
            yield TwoModels(server, port)
