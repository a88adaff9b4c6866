"""A server of another kind that only pretends to generate."""

import sys
from pathlib import Path

from bench.peers.recipes import Peer

SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Server(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply(json.dumps({"data": [{"id": "m", "meta": {"n_vocab": 500}}]}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        wanted = body["max_tokens"] - (sys.argv[2] == "short")
        chunks = [{"choices": [{"text": "a", "finish_reason": None}]}] * (wanted - 1)
        chunks += [{"choices": [{"text": "a", "finish_reason": "length"}]}]
        chunks += [{"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": wanted}}]
        self.reply("".join("data: " + json.dumps(chunk) + "\\n\\n" for chunk in chunks))

    def reply(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass

print("started", flush=True)
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Server).serve_forever()
"""


def fake(kind: str, name: str = "fake") -> Peer:
    return Peer(
        name=name,
        install=lambda: Path(sys.executable),
        command=lambda start: [str(start.program), "-c", SERVER, str(start.port), kind],
        weights=("bf16",),
    )


class Vocabulary:
    def get_vocab_size(self) -> int:
        return 500
