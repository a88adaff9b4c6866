"""Run a gateway as a separate process beside a running server."""

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
    """Yield the URL of a gateway, without a trailing slash."""
    port = free_port()
    with tempfile.TemporaryDirectory() as run_dir:
        command = [sys.executable, "-m", "http_proc", "--run-dir", run_dir]
        command += ["--endpoint", endpoint, "--port", str(port), "--model", str(model_dir)]
        command += ["--served-model-name", MODEL, "--log-level", "warning", "--insecure", *flags]
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
