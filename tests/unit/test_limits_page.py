"""docs/limits.md has the values, flags and error codes of the code, and no row that is not here."""

import re
from collections.abc import Callable

import pytest

from http_proc.apis import service
from http_proc.apis.responses import stored_responses
from http_proc.core import call, gateway, observe
from http_proc.generation import chat_call, sampling, schema
from http_proc.jobs import batch_lines, batches
from http_proc.page import live as live_page
from http_proc.page import what_if
from http_proc.server import MIN_CONNECTIONS
from http_proc.web import exchange, request_scope, resumable
from quadriga.sampling import params
from quadriga.server.config.flags import flag_fields, flag_name
from quadriga.server.config.server_config import ServerConfig
from quadriga.wire import client as wire
from quadriga.wire import what_if as what_if_wire
from scheduler_proc.planning import quarantine
from tests.unit.source_files import texts
from tests.users_book import DOCS
from tokenizer_proc import info
from tokenizer_proc.deliver import clients, live, traces
from tokenizer_proc.intake import grammar_sandbox, grammar_validator, pool
from tokenizer_proc.preparation import encode, validation
from tokenizer_proc.preparation.templates import sandbox

CONFIG = ServerConfig()
DAY_S = 24 * 3600
ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| ([^|]*) ?\| ([^|]+) \|$", re.M)


def size(num_bytes: float) -> str:
    """Return bytes as the page writes them."""
    for unit in ("KiB", "MiB", "GiB"):
        num_bytes /= 1024
        if num_bytes < 1024:
            return f"{num_bytes:g} {unit}"
    raise ValueError(num_bytes)


def number(value: float) -> str:
    return f"{value:,g}" if isinstance(value, float) and value < 1000 else f"{int(value):,}"


def none(value: object) -> str:
    """Return the word for a limit that is off by default."""
    assert value is None
    return "none"


HTTP, SCHEDULER, LAUNCH = CONFIG.http, CONFIG.scheduler, CONFIG.launch
VALUES: dict[str, tuple[Callable[..., str], object]] = {
    "tokens of an answer without a limit of its own": (number, CONFIG.frontend.default_max_tokens),
    "bytes of a body": (size, HTTP.max_body_bytes),
    "seconds in which a body must arrive": (number, exchange.BODY_TIMEOUT_S),
    "bytes of a prompt, after the chat template": (size, encode.MAX_TEXT_BYTES),
    "strings in a body over 256 KiB": (number, call.MAX_STRINGS),
    "objects and arrays in it": (number, call.MAX_CONTAINERS),
    "values in it": (number, call.MAX_COMMAS),
    "digits of a number in it": (number, call.MAX_DIGITS),
    "messages of a chat": (number, wire.MAX_TURNS),
    "content parts of all messages": (number, chat_call.MAX_CONTENT_PARTS),
    "tool calls of all messages": (number, wire.MAX_TOOL_CALLS),
    "tools": (number, wire.MAX_TOOLS),
    "characters of a tool's name": (number, chat_call.MAX_TOOL_NAME_CHARS),
    "characters of a `role`": (number, wire.MAX_ROLE_CHARS),
    "characters of another `name`": (number, wire.MAX_NAME_CHARS),
    "`chat_template_kwargs`": (number, wire.MAX_TEMPLATE_ARGS),
    "pairs of `metadata`": (number, schema.MAX_METADATA_PAIRS),
    "characters of its keys": (number, schema.MAX_METADATA_KEY_CHARS),
    "characters of its values": (number, schema.MAX_METADATA_CHARS),
    "characters of `X-Request-Id`": (number, exchange.MAX_REQUEST_ID_CHARS),
    "choices (`n`)": (number, params.MAX_CHOICES),
    "prompts times `n` of `/v1/completions`": (number, sampling.MAX_CHOICES_PER_REQUEST),
    "`logprobs` beside each token": (number, params.LIMITS["logprobs"].maximum),
    "characters of a grammar": (number, params.MAX_GRAMMAR_CHARS),
    "CPU seconds to compile a grammar": (number, grammar_sandbox.MAX_CPU_S),
    "grammars that wait to be compiled": (number, grammar_validator.MAX_PENDING),
    "seconds of `timeout`, `queue_timeout`, `ttft_target`": (number, validation.MAX_TIMEOUT_S),
    "bytes of memory of a chat template": (size, sandbox.MAX_GROWTH_BYTES),
    "requests that run": (number, SCHEDULER.max_running_requests),
    "requests in one step": (number, SCHEDULER.max_batch_size),
    "requests that wait": (number, SCHEDULER.max_queued_requests),
    "open requests of one client": (none, SCHEDULER.max_requests_per_client),
    "requests and tokens in a minute, open requests, of a key": (none, None),
    "seconds until admission": (none, CONFIG.frontend.queue_timeout),
    "seconds of a request": (none, CONFIG.frontend.request_timeout),
    "texts that are being encoded, of all clients": (size, pool.MAX_PENDING_BYTES),
    "texts that are being encoded, of one client": (size, pool.MAX_PENDING_BYTES_OF_CLIENT),
    "bodies that are being received": (size, gateway.MAX_TOTAL_BODY_BYTES),
    "HTTP connections, at least": (number, MIN_CONNECTIONS),
    "whole answers that are not read": (size, request_scope.MAX_UNREAD_BYTES),
    "bytes that a reader takes in 30 s, at least": (size, request_scope.MIN_BYTES_PER_INTERVAL),
    "crashes of the worker by one request": (number, quarantine.MAX_WORKER_CRASHES),
    "seconds that a resumable stream is kept": (number, HTTP.resume_window),
    "resumable streams": (number, HTTP.max_resumable_streams),
    "bytes of their events and bodies": (size, resumable.MAX_BYTES),
    "stored responses and conversations": (number, HTTP.max_stored_responses),
    "bytes of stored responses": (size, HTTP.max_stored_bytes),
    "days that they are kept": (number, HTTP.max_stored_age / DAY_S),
    "responses in the background": (number, HTTP.max_background_responses),
    "bytes of a page of items": (size, stored_responses.MAX_PAGE_BYTES),
    "referred items of open requests": (size, gateway.MAX_TOTAL_BODY_BYTES),
    "bytes of a file": (size, HTTP.max_file_bytes),
    "bytes of all files": (size, HTTP.max_files_bytes),
    "open batches": (number, HTTP.max_open_batches),
    "lines of a batch": (number, batch_lines.MAX_LINES),
    "characters of a `custom_id`": (number, batch_lines.MAX_CUSTOM_ID_CHARS),
    "ended batches": (number, batches.MAX_KEPT_BATCHES),
    "GiB of KV pages on disk": (number, CONFIG.worker.kv_cache_dir_size),
    "bytes of traces": (size, traces.MAX_KEPT_BYTES),
    "bytes of the gateway's part of traces, and of recent requests": (size, observe.MAX_KEPT_BYTES),
    "recent requests of one list": (number, service.MAX_RECENT),
    "bytes of a message": (size, wire.MAX_FRAME_BYTES),
    "messages that a client leaves unread": (number, clients.MAX_UNREAD_MESSAGES),
    "bytes that a client leaves unread": (size, clients.MAX_UNREAD_BYTES),
    "characters of a `request_id`": (number, validation.MAX_REQUEST_ID_CHARS),
    "ids in `get_progress` and `get_traces`": (number, wire.MAX_PROGRESS_IDS),
    "questions (`get_info` and others) of one client": (number, info.MAX_PENDING_OF_CLIENT),
    "questions of all clients": (number, info.MAX_PENDING),
    "watchers of the live feed": (number, live.MAX_VIEWERS),
    "seconds until every process is ready": (number, LAUNCH.start_timeout),
    "seconds that open requests have at a stop": (number, LAUNCH.shutdown_timeout),
    "restarts of one process in five minutes": (number, LAUNCH.max_restarts),
    "seconds without an answer of a process": (number, LAUNCH.watchdog_timeout),
    "viewers of the live view by HTTP": (number, live_page.MAX_VIEWERS),
    "requests that a what-if simulates, of the last": (number, observe.MAX_RECENT_CHOICES),
    "seconds of a what-if": (number, what_if.TIMEOUT_S),
    "variants of a what-if": (number, what_if_wire.MAX_VARIANTS),
}
# Bounds that depend on the model and the machine.
WORDS = {
    "tokens of prompt and answer": "the model's context",
    "tokens of prompt and answer, if the pool is small": "the KV pool",
}


def rows() -> list[tuple[str, str, str, str]]:
    """Return limit, value, flag and answer of every row."""
    found = ROW.findall((DOCS / "limits.md").read_text())
    return [row for row in found if row[0] != "limit" and not row[0].startswith("---")]


def test_every_value_on_the_page_is_that_of_the_code() -> None:
    shown = {limit: value for limit, value, _, _ in rows()}
    expected = {limit: write(value) for limit, (write, value) in VALUES.items()}
    assert shown == expected | WORDS


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_flags_and_codes_of_a_row_exist(row: tuple[str, str, str, str]) -> None:
    _, _, flags, answer = row
    known = {flag_name(field.name) for field in flag_fields(*CONFIG.groups())}
    named = set(re.findall(r"--[a-z-]+", flags + answer))
    assert named <= known
    codes = re.findall(r"\b[45]\d\d `(\w+)`|^`(\w+)`", answer)
    assert all("".join(code) in texts() for code in codes)
