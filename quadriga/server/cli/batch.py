"""`quadriga batch in.jsonl -o out.jsonl`: run a file of requests, and go on after an interruption.

`out.jsonl.state` names the batch until its output is written: the same command goes on with it.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from quadriga import disk
from quadriga.errors import InvalidRequest, RequestFailed, ServerUnreachable
from quadriga.server.cli.server_api import CallRefused, ServerApi
from quadriga.server.cli.shared import add_url, note

POLL_S = 0.5
# A server that is restarted answers again within this time.
UNREACHABLE_S = 120.0
ENDED = ("completed", "failed", "expired", "cancelled")
FIRST_LINE_BYTES = 16 * 1024 * 1024


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("input", type=Path, metavar="in.jsonl", help="a request in each line")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="out.jsonl",
        help="its answers; lines that failed go to out.jsonl.errors",
    )  # fmt: skip
    add_url(parser)
    parser.add_argument(
        "--cancel", action="store_true", help="end the batch, and write what is answered"
    )


def run(arguments: argparse.Namespace) -> None:
    """Start the batch of a file, or go on with it, and write its output."""
    api = ServerApi(arguments.url, arguments.api_key)
    output: Path = arguments.output
    state = output.with_name(output.name + ".state")
    batch_id = _batch_of(state, arguments, api)
    try:
        if arguments.cancel:
            _cancel(api, batch_id)
        batch = _wait(api, batch_id)
    except KeyboardInterrupt:
        note(f"\n{batch_id} goes on at the server: run this again to wait for it, or with --cancel")
        raise
    _write(api, batch, output)
    state.unlink()
    _report(batch, output)


def _batch_of(state: Path, arguments: argparse.Namespace, api: ServerApi) -> str:
    """Return the id of the batch that the state names, or of a new one."""
    source = {"input": str(arguments.input.resolve()), "url": arguments.url}
    if state.exists():
        known = json.loads(state.read_text())
        if {name: known.get(name) for name in source} != source:
            raise InvalidRequest(
                f"{state} belongs to {known.get('input')} at {known.get('url')}: remove it to start"
                " again, or choose another --output"
            )
        note(f"goes on with {known['batch']}")
        return str(known["batch"])
    if arguments.cancel:
        raise InvalidRequest(f"there is no {state}: no batch of this output is open")
    endpoint = _endpoint(arguments.input)
    batch_id = str(api.create(api.upload(arguments.input), endpoint)["id"])
    disk.replace(state, json.dumps(source | {"batch": batch_id}).encode())
    return batch_id


def _endpoint(path: Path) -> str:
    """Return the endpoint that the first line of a file names; the server checks the others."""
    with path.open("rb") as file:
        line = file.readline(FIRST_LINE_BYTES)
    try:
        return str(json.loads(line.removeprefix(b"\xef\xbb\xbf"))["url"])
    except (ValueError, LookupError, TypeError):
        raise InvalidRequest(
            f"{path}: line 1 is no request: it must be an object with custom_id, method, url, body"
        ) from None


def _cancel(api: ServerApi, batch_id: str) -> None:
    try:
        api.cancel(batch_id)
    except CallRefused as error:
        if error.status != 409:  # it has ended by itself
            raise


def _wait(api: ServerApi, batch_id: str) -> dict[str, Any]:
    """Show the progress of a batch until it ends, and return it."""
    with tqdm(unit="line", desc=batch_id[:14], dynamic_ncols=True) as bar:
        while True:
            batch = _patiently(api, batch_id)
            counts = batch["request_counts"]
            bar.total = counts["total"] or None
            bar.n = counts["completed"] + counts["failed"]
            bar.set_postfix_str(f"{batch['status']}, {counts['failed']} failed")
            if batch["status"] in ENDED:
                return batch
            time.sleep(POLL_S)


def _patiently(api: ServerApi, batch_id: str) -> dict[str, Any]:
    """Return a batch, also while the server is being restarted."""
    began_at = time.monotonic()
    while True:
        try:
            return api.batch(batch_id)
        except (ServerUnreachable, CallRefused) as error:
            is_down = isinstance(error, ServerUnreachable) or error.status == 503
            if not is_down or time.monotonic() - began_at > UNREACHABLE_S:
                raise
        time.sleep(POLL_S)


def _write(api: ServerApi, batch: dict[str, Any], output: Path) -> None:
    if batch["output_file_id"]:
        api.download(batch["output_file_id"], output)
    elif batch["status"] != "failed":
        output.write_bytes(b"")
    if batch["error_file_id"]:
        api.download(batch["error_file_id"], output.with_name(output.name + ".errors"))


def _report(batch: dict[str, Any], output: Path) -> None:
    """Print what became of a batch. Raise an error if it was refused."""
    counts = batch["request_counts"]
    if batch["status"] == "failed":
        errors = (batch["errors"] or {"data": []})["data"]
        lines = [f"line {e['line']}: {e['message']}" if e["line"] else e["message"] for e in errors]
        raise RequestFailed("the batch was refused: " + "; ".join(lines[:5]))
    note(
        f"{batch['status']}: {counts['completed']} of {counts['total']} lines are in {output}"
        + (f", {counts['failed']} failed: {output}.errors" if counts["failed"] else "")
    )
