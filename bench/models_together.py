"""Measure models of one server: `python -m bench.models_together NAME=MODEL ... [-- FLAGS]`.

The server is started twice: with all models loaded, and with models that are loaded on demand.
Reported are the seconds to the ready line and to the first answer of each model, what each endpoint
answers for it, the memory of each process (PSS), and the CPU time of the idle server.
"""

import json
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.cli.command import EXIT_OK, command_parser, run_command
from bench.client.server import OwnServer, free_port
from bench.turns import split_common
from quadriga.errors import ConfigError
from quadriga.server.config import server_config
from quadriga.server.config.parser import ServerParser

TIMEOUT_S = 120.0
READY = "quadriga ready"
OF_MODEL = "--of-model"
TEXT = "The capital of France is"
CHAT = {"messages": [{"role": "user", "content": "Name the capital of France."}]}
# The body of each endpoint, and how its answer is shown.
ENDPOINTS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": (CHAT | {"max_tokens": 12, "temperature": 0}, "text"),
    "/v1/completions": ({"prompt": TEXT, "max_tokens": 8, "temperature": 0}, "text"),
    "/v1/responses": ({"input": TEXT, "max_output_tokens": 8}, "status"),
    "/v1/messages": (CHAT | {"max_tokens": 8}, "stop_reason"),
    "/v1/embeddings": ({"input": TEXT}, "vector"),
    "/v1/rerank": ({"query": "Paris", "documents": ["a city", "a fruit"]}, "scores"),
    "/api/generate": ({"prompt": TEXT, "stream": False, "options": {"num_predict": 8}}, "text"),
    "/api/embed": ({"input": TEXT}, "vector"),
}


def ask(url: str, path: str, model: str) -> str:
    """Return what an endpoint answers for a model, in a few words."""
    body, shown = ENDPOINTS[path]
    data = json.dumps({"model": model, **body}).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return _shown(json.load(answer), shown)
    except urllib.error.HTTPError as error:
        answer = json.load(error)
        message = answer["error"] if path.startswith("/api/") else answer["error"]["message"]
        return f"{error.code}: {str(message)[:60]}"


def _shown(answer: dict[str, Any], shown: str) -> str:
    match shown:
        case "text":
            choice = answer["choices"][0] if "choices" in answer else answer
            text = choice["message"]["content"] if "message" in choice else None
            return repr(text or choice.get("text") or choice.get("response"))
        case "vector":
            vector = answer["data"][0]["embedding"] if "data" in answer else answer["embeddings"][0]
            return f"{len(vector)} numbers"
        case "scores":
            return ", ".join(f"{each['relevance_score']:.2f}" for each in answer["results"])
    return str(answer[shown])


class Measured:
    """A server that runs, and its processes by their names."""

    def __init__(self, server: OwnServer, log: Path, port: int, began_at: float) -> None:
        while READY not in log.read_text():
            server.check()
            time.sleep(0.02)
        self.ready_s = time.monotonic() - began_at
        self.url = f"http://127.0.0.1:{port}"
        with urllib.request.urlopen(f"{self.url}/server_info", timeout=TIMEOUT_S) as answer:
            launcher = psutil.Process(json.load(answer)["pids"]["launcher"])
        self._processes = [launcher, *launcher.children(recursive=True)]

    def memory(self) -> list[tuple[str, float]]:
        """Return the MB (PSS) of each process."""
        return [(_name(p), p.memory_full_info().pss / 1e6) for p in self._processes]

    def cpu_s(self) -> float:
        """Return the CPU seconds of all processes so far."""
        return float(sum(sum(process.cpu_times()[:2]) for process in self._processes))


def _name(process: psutil.Process) -> str:
    words = process.cmdline()
    name = next((Path(word).name for word in words if "_proc" in word), process.name())
    return f"{name}@{words[words.index(OF_MODEL) + 1]}" if OF_MODEL in words else name


def measure(models: dict[str, dict[str, Any]], flags: Sequence[str], idle_s: float) -> None:
    """Start the servers and print what they need and answer."""
    for preload in (True, False):
        with tempfile.TemporaryDirectory() as name:
            file, log, port = Path(name) / "models.yaml", Path(name) / "log", free_port()
            listed = {model: entry | {"preload": preload} for model, entry in models.items()}
            file.write_text(json.dumps(listed))
            namespace = ServerParser("server").parse_flags(["--models", str(file), *flags])
            config = server_config.from_namespace(namespace)
            began_at = time.monotonic()
            with OwnServer(config, log, http_port=port) as server:
                measured = Measured(server, log, port, began_at)
                how = "all loaded" if preload else "on demand"
                print(f"ready after {measured.ready_s:.1f} s ({how})")
                _report(measured, list(models), preload, idle_s)


def _report(measured: Measured, models: list[str], is_loaded: bool, idle_s: float) -> None:
    if not is_loaded:
        for model in models:
            began_at = time.monotonic()
            first = next(
                path
                for path in ("/v1/completions", "/v1/embeddings")
                if not ask(measured.url, path, model).startswith("4")
            )
            print(f"  {model}: {first} answers after {time.monotonic() - began_at:.1f} s")
        return
    for path in ENDPOINTS:
        for model in models:
            print(f"  {path} {model}: {ask(measured.url, path, model)}")
    memory = measured.memory()
    for name, megabytes in memory:
        print(f"  {name}: {megabytes:.0f} MB")
    before = measured.cpu_s()
    time.sleep(idle_s)
    total = sum(megabytes for _, megabytes in memory)
    print(f"  all: {total:.0f} MB; {measured.cpu_s() - before:.2f} s of CPU in {idle_s:g} s idle")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    own, flags = split_common(sys.argv[1:] if arguments is None else list(arguments))
    parser = command_parser("bench.models_together", __doc__)
    parser.add_argument("models", nargs="+", metavar="NAME=MODEL")
    parser.add_argument("--idle", type=float, default=60.0, help="seconds to be idle")
    options = parser.parse_args(own)

    def work() -> int:
        models: dict[str, dict[str, Any]] = {}
        for text in options.models:
            name, equals, model = text.partition("=")
            if not equals:
                raise ConfigError(f"{text!r} is no model: write NAME=MODEL")
            models[name] = {"model": model}
        measure(models, flags, options.idle)
        return EXIT_OK

    return run_command("bench.models_together", work)


if __name__ == "__main__":
    sys.exit(main())
