"""deploy/nginx.conf in a running nginx: streams, resumption, uploads, metrics, TLS."""

import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

import pytest

from bench.client.server import free_port
from tests.server import ROOT, running_server, wait_until

CONF = ROOT / "deploy" / "nginx.conf"
KEY = "a-key"
AUTHORIZED = {"Authorization": f"Bearer {KEY}", "Host": "llm.example.org"}
# Debian keeps it where only root's PATH leads.
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
WRAPPER = """
daemon off;
{user}
pid {home}/nginx.pid;
error_log {home}/error.log warn;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {home}/body;
    proxy_temp_path {home}/proxy;
    fastcgi_temp_path {home}/fastcgi;
    uwsgi_temp_path {home}/uwsgi;
    scgi_temp_path {home}/scgi;
    include {home}/quadriga.conf;
}}
"""


def as_deployed(home: Path, gateway: int, port: int) -> str:
    """Return deploy/nginx.conf with this test's ports and certificate, and nothing else changed."""
    text = CONF.read_text()
    changes = {
        r"server 127\.0\.0\.1:8000;": f"server 127.0.0.1:{gateway};",
        r"listen 443 ssl;": f"listen 127.0.0.1:{port} ssl;",
        r" *listen \[::\]:443 ssl;\n": "",
        r"/etc/nginx/tls/llm\.example\.org": f"{home}/tls",
    }
    for pattern, replacement in changes.items():
        text, count = re.subn(pattern, replacement, text)
        assert count, f"deploy/nginx.conf has no {pattern}"
    return text


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Proxy:
    """The running nginx: requests through it, over TLS."""

    def __init__(self, port: int, certificate: Path) -> None:
        self.port = port
        self._tls = ssl.create_default_context(cafile=str(certificate))

    def connection(self) -> HTTPSConnection:
        return HTTPSConnection("127.0.0.1", self.port, timeout=30, context=self._tls)

    def ask(
        self, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Return status and body."""
        connection = self.connection()
        sent = AUTHORIZED | (headers or {})
        connection.request("GET" if body is None else "POST", path, body, sent)
        answer = connection.getresponse()
        found = answer.status, answer.read()
        connection.close()
        return found


@pytest.fixture(scope="module")
def proxy(llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    if NGINX is None:
        pytest.skip("no nginx: install it (Debian: nginx-light)")
    home = tmp_path_factory.mktemp("nginx")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "2", "-subj", "/CN=llm.example.org",
         "-addext", "subjectAltName=IP:127.0.0.1,DNS:llm.example.org",
         "-keyout", f"{home}/tls.key", "-out", f"{home}/tls.pem"],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    gateway, port = free_port(), free_port()
    (home / "quadriga.conf").write_text(as_deployed(home, gateway, port))
    user = "user root;" if os.getuid() == 0 else ""
    (home / "nginx.conf").write_text(WRAPPER.format(home=home, user=user))
    command = [NGINX, "-p", str(home), "-c", f"{home}/nginx.conf"]
    subprocess.run([*command, "-t"], check=True, capture_output=True, timeout=30)
    flags = ["--model", str(llama_dir), "--dtype", "float32", "--worker-threads", "1"]
    flags += ["--max-total-tokens", "4096", "--port", str(gateway), "--api-key", KEY]
    with running_server(home / "log", *flags, endpoint=f"ipc://{home}/zmq"):
        nginx = subprocess.Popen(command)
        try:
            wait_until(lambda: accepts(port), 10)
            yield Proxy(port, home / "tls.pem")
        finally:
            nginx.terminate()
            nginx.wait(10)


STREAM = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True, "temperature": 0}


def events_of(data: bytes) -> list[dict[str, Any]]:
    lines = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(line) for line in lines]


def test_a_stream_has_the_id_of_its_client_and_goes_on_from_any_event(proxy: Proxy) -> None:
    body = json.dumps(STREAM | {"resumable": True}).encode()
    connection = proxy.connection()
    connection.request("POST", "/v1/completions", body, AUTHORIZED | {"X-Request-Id": "fox-1"})
    answer = connection.getresponse()
    assert (answer.status, answer.headers["X-Stream-Id"]) == (200, "fox-1")
    first = b""
    while first.count(b"\n\n") < 5:
        first += answer.readline()
    assert b"[DONE]" not in first, "events pass one by one"
    connection.close()
    status, rest = proxy.ask("/v1/streams/fox-1", headers={"Last-Event-ID": "5"})
    assert status == 200 and rest.endswith(b"data: [DONE]\n\n")
    status, whole = proxy.ask("/v1/streams/fox-1", headers={"Last-Event-ID": "0"})
    assert whole == first + rest
    text = "".join(event["choices"][0]["text"] for event in events_of(whole) if event["choices"])
    status, undisturbed = proxy.ask(
        "/v1/completions", json.dumps(STREAM | {"stream": False}).encode()
    )
    assert text == json.loads(undisturbed)["choices"][0]["text"]


def test_a_request_without_an_id_gets_one(proxy: Proxy) -> None:
    connection = proxy.connection()
    connection.request("GET", "/v1/models", headers=AUTHORIZED)
    answer = connection.getresponse()
    assert re.fullmatch(r"[0-9a-f]{32}", answer.headers["X-Request-Id"])
    connection.close()


def upload(proxy: Proxy, num_bytes: int) -> tuple[int, Any]:
    line = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n'
    content = (line * (num_bytes // len(line) + 1))[:num_bytes]
    parts = [
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n',
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="x.jsonl"\r\n\r\n',
        content,
        b"\r\n--b--\r\n",
    ]
    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    status, body = proxy.ask("/v1/files", b"".join(parts), kind)
    return status, json.loads(body)


@pytest.mark.parametrize("num_bytes", [18 * 1024 * 1024, 200 * 1024 * 1024])
def test_an_upload_may_be_as_large_as_the_server_takes(proxy: Proxy, num_bytes: int) -> None:
    status, body = upload(proxy, num_bytes)
    assert status == 200, body
    assert body["bytes"] == num_bytes


def test_a_larger_upload_is_refused_in_the_form_of_the_api(proxy: Proxy) -> None:
    status, body = upload(proxy, 200 * 1024 * 1024 + 1)
    assert (status, body["error"]["code"]) == (413, "file_too_large")


def test_only_this_machine_reads_the_metrics_and_only_with_a_key(proxy: Proxy) -> None:
    status, body = proxy.ask("/metrics")
    assert status == 200 and b"quadriga:num_requests_running" in body
    request = urllib.request.Request(f"https://127.0.0.1:{proxy.port}/metrics")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(request, timeout=30, context=proxy._tls)
