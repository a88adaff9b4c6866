"""Start a web gateway for a test, in a process of its own beside a running ring."""

import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from bench.client.server import free_port
from tests.server import ROOT
from tests.waiting import wait_until

MODEL = "tiny"


@contextmanager
def running_gateway(endpoint: str, model_dir: object, *flags: str) -> Iterator[str]:
    """Start a gateway and yield its URL, without a slash at the end."""
    port = free_port()
    with tempfile.TemporaryDirectory() as run_dir:
        command = [sys.executable, "-m", "http_proc", "--run-dir", run_dir]
        command += ["--endpoint", endpoint, "--port", str(port), "--model", str(model_dir)]
        command += ["--served-model-name", MODEL, "--log-level", "warning", *flags]
        process = subprocess.Popen(command, cwd=ROOT)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(process, url)
            yield url
        finally:
            process.terminate()
            process.wait(10)


def _wait_until_ready(process: "subprocess.Popen[bytes]", url: str) -> None:
    def is_ready() -> bool:
        assert process.poll() is None, "the gateway did not start"
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=5):
                return True
        except (urllib.error.URLError, ConnectionError):
            return False

    wait_until(is_ready, 30)
