"""A client made of pyzmq and msgpack only, as a model for clients in other languages.

python examples/raw_client.py [ENDPOINT]
"""

import os
import sys
import uuid

import msgpack
import zmq

endpoint = sys.argv[1] if len(sys.argv) > 1 else "tcp://127.0.0.1:5555"

socket = zmq.Context().socket(zmq.DEALER)
socket.setsockopt(zmq.ROUTING_ID, os.urandom(16))
socket.setsockopt(zmq.LINGER, 0)
socket.connect(endpoint)

request_id = uuid.uuid4().hex
prompt = [{"role": "user", "content": "Name the capital of France."}]
params = {"max_new_tokens": 32, "temperature": 0.0}
socket.send(msgpack.packb(["generate", 1, request_id, prompt, params]))

while True:
    if not socket.poll(30_000):
        sys.exit(f"no answer from {endpoint} within 30 s")
    tag, *fields = msgpack.unpackb(socket.recv())
    if tag == "chunks":
        for _request_id, _text_offset, text, _token_ids, _token_times, end in fields[0]:
            print(text, end="", flush=True)
            if end:
                finish_reason, usage = end[0], end[1]
                print(f"\n[{finish_reason}, {usage[1]} tokens]")
                sys.exit(0)
    elif tag in ("refused", "server_gone"):
        sys.exit(f"error: {fields[-1]}")
