"""The requests of a recording, in the order in which they are sent, and the servers that get them.

A body is a JSON value, or bytes. `$name` in targets, headers and bodies stands for what an earlier
call has kept under this name.
"""

import gzip
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from tests.identity.model import ANSWERS, BREAK, COMMON, Answers, cut


@dataclass(frozen=True)
class Plan:
    """A server.

    Attributes:
        flags: of launcher.py, beside those of its model and its ports. `$home`: its directory.
        answers: those that its model has learnt by heart.
        chats: whether its model has a chat template.
        headers: with which all its requests are answered.
        files: written before its start into its directory.
    """

    flags: list[str]
    answers: Answers = field(default_factory=lambda: ANSWERS)
    chats: bool = True
    headers: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """A request, and what is recorded of its answer.

    Attributes:
        name: begins with the API, and is unique.
        target: method and path.
        body: a JSON value, or bytes.
        headers: beside Host and Content-Length.
        server: which of SERVERS gets it.
        keep: values of the answer that later calls send, by name; see `find` in recording.py.
        until: a value of the answer, and those with one of which it is recorded: until then the
            request is sent again.
        pause_s: wait before the request: so that its object has a later `created_at`, as lists are
            in the order of whole seconds, or until what is before is on the disk.
        leave_after: number of events after which the client leaves.
        tail: number of the last events, which alone are recorded.
        fillers: long streams of so many choices that are open at the same time.
        during: requests that are sent while this one waits behind a filler.
        shape: record names and structure only.
        is_file: record a hash of the body.
        vary: patterns of the answer whose first group differs from run to run.
        raw: the bytes of the whole request, instead of all others.
    """

    name: str
    target: str
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    server: str = "main"
    keep: dict[str, str] = field(default_factory=dict)
    until: tuple[str, tuple[Any, ...]] | None = None
    pause_s: float = 0
    leave_after: int | None = None
    tail: int | None = None
    fillers: tuple[int, ...] = ()
    during: "tuple[Call, ...]" = ()
    shape: bool = False
    is_file: bool = False
    vary: tuple[str, ...] = ()
    raw: bytes | None = None

    @property
    def api(self) -> str:
        return self.name.partition("/")[0]


MODEL = "tiny"
FLAGS = [
    "--served-model-name", MODEL, "--device", "cpu", "--dtype", "float32",
    "--attention-backend", "native", "--worker-threads", "1", "--speculative-method", "none",
    "--max-total-tokens", "16384", "--chunked-prefill-size", "256", "--max-batch-size", "16",
    "--sse-ping-interval", "0", "--log-level", "warning",
]  # fmt: skip
OPERATOR, PAGE = "operator-key", "https://page.example"
TENANTS = {
    "alice": "  sub_tenants: true\n",
    "bob": "  requests_per_minute: 1\n  priority: [-100, -10]\n",
    "carol": "  max_open_requests: 1\n",
    "dave": "  tokens_per_minute: 20\n  max_files_bytes: 300\n",
    "erin": "  models: [other]\n  cache: own\n",
}


def _key(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {tenant}-key"}


def _key_file() -> str:
    return "".join(
        f"- name: {tenant}\n  key: sha256:{hashlib.sha256(f'{tenant}-key'.encode()).hexdigest()}\n"
        + fields
        for tenant, fields in TENANTS.items()
    )


SERVERS = {
    "main": Plan(
        [*FLAGS, "--keep-traces", "all", "--max-running-requests", "64",
         "--context-length", "1024"],
    ),
    # One request at a time, short queues, tenants, and small bounds.
    "keys": Plan(
        [*FLAGS, "--keys", "$home/keys.yaml", "--api-key", OPERATOR, "--allowed-origins", PAGE,
         "--insecure",
         "--max-body-bytes", "4096", "--max-running-requests", "1",
         "--max-queued-requests", "8", "--no-ui", "--schedule-policy", "priority"],
        headers={"Authorization": f"Bearer {OPERATOR}"},
        files={"keys.yaml": _key_file()},
    ),
    # A base model in two replicas, which stores nothing.
    "base": Plan(
        [*FLAGS, "--no-store", "--no-ui", "--dp", "2", "--load-balance-method", "round-robin",
         "--allow-auto-truncate", "--default-max-tokens", "8",
         "--context-length", "128", "--allowed-hosts", "llm.example.org"],
        chats=False,
    ),
}  # fmt: skip
# How models write calls, in the forms of --tool-call-parser: the beginning of their answer, and two
# calls.
STYLES = {
    "qwen3_coder": (
        "Let me see.\n<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n",
        "<tool_call>\n<function=note>\n<parameter=text>\na < b\n</parameter>\n<parameter=tags>\n"
        '["x", null]\n</parameter>\n</function>\n</tool_call>',
    ),
    "mistral": (
        '[THINK]Hm.[/THINK]Let me see.[TOOL_CALLS]weather[ARGS]{"city": "Rome", "days": 3}',
        '[TOOL_CALLS]note[ARGS]{"text": "a < b", "tags": ["x", null]}',
    ),
    "pythonic": ('[weather(city="Rome", days=3), ', """note(text='a < b', tags=["x", None])]"""),
    "gemma4": (
        'Let me see.<|tool_call>call:weather{city:<|"|>Rome<|"|>,days:3}<tool_call|>',
        '<|tool_call>call:note{text:<|"|>a < b<|"|>,tags:[<|"|>x<|"|>,null]}<tool_call|>',
    ),
    "harmony": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "Let me see.<|end|><|start|>assistant",
        "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Rome", "days": 3}<|call|>',
    ),
    "granite": (
        'Let me see.<|tool_call|>[{"name": "weather", "arguments": {"city": "Rome", "days": 3}}, ',
        '{"arguments": {"text": "a < b", "tags": ["x", null]}, "name": "note"}]',
    ),
    "llama3_json": (
        '{"name": "weather", "parameters": {"city": "Rome", "days": 3}}; ',
        '{"name": "note", "parameters": {"text": "a < b", "tags": ["x", null]}}',
    ),
}
for _style, _parts in STYLES.items():
    SERVERS[_style] = Plan(
        [*FLAGS, "--tool-call-parser", _style, "--reasoning-parser",
         _style if _style in ("mistral", "harmony") else "think",
         "--max-running-requests", "1",
         *(["--queue-timeout", "3"] if _style == "llama3_json" else [])],
        {**COMMON, "call": cut("".join(_parts)), "break": BREAK},
    )  # fmt: skip

FILLER = {
    "prompt": [5, 6, 7], "max_tokens": 12000, "ignore_eos": True, "stream": True, "seed": 1,
}  # fmt: skip


# --- parts of bodies ------------------------------------------------------------------------------


def _user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "Tell the weather.", "parameters": CITY}
WEATHER = {"type": "function", "function": FUNCTION}
STRICT = {"type": "function", "function": {**FUNCTION, "strict": True}}
TIME = {"type": "function", "function": {"name": "time"}}
TOOLS = [WEATHER, TIME]
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}, "ok": {"type": "boolean"}},
    "required": ["x", "ok"],
    "additionalProperties": False,
}
LONG = "the water " * 600
GREEDY = {"temperature": 0, "max_tokens": 12}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Which way to the water?"},
    {"role": "assistant", "content": "Over the hill.", "reasoning_content": "There is a hill."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "How "}, {"type": "text", "text": "far?"}],
    },
]
CALLED = [
    {"role": "user", "content": "Weather in Rome?"},
    {"role": "assistant", "content": None,
     "tool_calls": [{"id": "call_1", "type": "function",
                     "function": {"name": "weather", "arguments": '{"city": "Rome", "days": 2}'}}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "Sun."},
]  # fmt: skip


def _chat(name: str, text: str | list[Any] = "Where is the sea?", /, **fields: Any) -> Call:
    """Return a chat. Fields in capitals, such as KEEP, are those of the Call."""
    messages = _user(text) if isinstance(text, str) else text
    return _post(f"chat/{name}", "/v1/chat/completions", {"messages": messages, **GREEDY}, fields)


def _text(name: str, prompt: Any = "The water is", /, **fields: Any) -> Call:
    return _post(f"completions/{name}", "/v1/completions", {"prompt": prompt, **GREEDY}, fields)


def _response(name: str, given: Any = "Where is the sea?", /, **fields: Any) -> Call:
    body = {"input": given, "temperature": 0, "max_output_tokens": 12}
    return _post(f"responses/{name}", "/v1/responses", body, fields)


def _message(name: str, text: str | list[Any] = "Where is the sea?", /, **fields: Any) -> Call:
    messages = _user(text) if isinstance(text, str) else text
    body = {"model": MODEL, "messages": messages, **GREEDY}
    return _post(f"messages/{name}", "/v1/messages", body, fields)


def _count(name: str, /, **fields: Any) -> Call:
    body = {"model": MODEL, "messages": _user("Where is the sea?")}
    return _post(f"count_tokens/{name}", "/v1/messages/count_tokens", body, fields)


def _ollama(name: str, path: str, /, **fields: Any) -> Call:
    options = {"temperature": 0, "num_predict": 12}
    return _post(f"ollama/{name}", f"/api/{path}", {"model": MODEL, "options": options}, fields)


def _generate(name: str, /, **fields: Any) -> Call:
    sampling = {"temperature": 0, "max_new_tokens": 8}
    return _post(f"generate/{name}", "/generate", {"sampling_params": sampling}, fields)


def _infill(name: str, /, **fields: Any) -> Call:
    body = {"input_prefix": "The water", "input_suffix": " cold.", "n_predict": 8, "temperature": 0}
    return _post(f"infill/{name}", "/infill", body, fields)


def _post(name: str, path: str, body: dict[str, Any], fields: dict[str, Any]) -> Call:
    """Return a POST of the body with further fields; those in capitals are fields of the Call."""
    of_call = {name.lower(): value for name, value in fields.items() if name.isupper()}
    others = {name: value for name, value in fields.items() if not name.isupper()}
    whole = {key: value for key, value in {**body, **others}.items() if value is not LEFT_OUT}
    return Call(name, f"POST {path}", whole, **of_call)


LEFT_OUT = object()
BOUNDARY = "----recording"
FORM = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}


def _form(text: str, purpose: str | None = "batch", filename: str = "in.jsonl") -> bytes:
    parts = []
    if purpose is not None:
        parts.append(f'Content-Disposition: form-data; name="purpose"\r\n\r\n{purpose}')
    parts.append(
        f'Content-Disposition: form-data; name="file"; filename="{filename}"\r\n'
        f"Content-Type: application/jsonl\r\n\r\n{text}"
    )
    body = "".join(f"--{BOUNDARY}\r\n{part}\r\n" for part in parts)
    return f"{body}--{BOUNDARY}--\r\n".encode()


def _lines(url: str, *bodies: Any) -> str:
    return "".join(
        json.dumps({"custom_id": f"line-{index}", "method": "POST", "url": url, "body": body})
        + "\n"
        for index, body in enumerate(bodies)
    )


def _get(name: str, path: str, **fields: Any) -> Call:
    return Call(name, f"GET {path}", **fields)


def _raw(name: str, *lines: str, body: str = "", **fields: Any) -> Call:
    sizes = {name.partition(":")[0] for name in lines} & {"Transfer-Encoding", "Content-Length"}
    length = [f"Content-Length: {len(body)}"] if body and not sizes else []
    head = "".join(f"{line}\r\n" for line in (*lines, *length))
    return Call(name, lines[0] if lines else "", raw=f"{head}\r\n{body}".encode(), **fields)


# --- what is served -------------------------------------------------------------------------------

# What is built of the page's source; a test of the page compares both.
BUILT = (r'ETag: "(\w+)"', r"<(\d+ bytes, sha256 \w+)>")
SERVED = [
    _get("probes/livez", "/livez"),
    _get("probes/readyz", "/readyz"),
    _get("probes/health", "/health"),
    _get("server_info/all", "/server_info", shape=True),
    _get("models/list", "/v1/models"),
    _get("models/one", "/v1/models/tiny"),
    _get("models/anthropic_list", "/v1/models", headers={"anthropic-version": "2023-06-01"}),
    _get("models/anthropic_one", "/v1/models/tiny", headers={"anthropic-version": "2023-06-01"}),
    _get("models/unknown", "/v1/models/other/model"),
    _get("pages/landing_json", "/"),
    _get("pages/landing_page", "/", headers={"Accept": "text/html"}, is_file=True),
    _get(
        "pages/landing_gzip",
        "/",
        headers={"Accept": "text/html", "Accept-Encoding": "gzip"},
        is_file=True,
    ),
    _get("pages/script", "/ui/app.js", is_file=True, keep={"etag": "header:ETag"}, vary=BUILT),
    _get("pages/script_unchanged", "/ui/app.js", headers={"If-None-Match": "$etag"}, vary=BUILT),
    _get("pages/style", "/ui/app.css", is_file=True, vary=BUILT),
    _get("pages/unknown", "/ui/none.js"),
    _get("pages/docs", "/docs", is_file=True),
    _get("pages/ollama_probe", "/", headers={"User-Agent": "ollama-python/0.6"}),
    Call("pages/head", "HEAD /"),
    _get("openapi/document", "/openapi.json"),
    _get("what_if/nothing_yet", "/v1/what_if"),
    Call("what_if/nothing_recorded", "POST /v1/what_if", {}),
]

# --- OpenAI: completions --------------------------------------------------------------------------

COMPLETIONS = [
    _text("plain"),
    _text("default_length", max_tokens=LEFT_OUT),
    _text("ids", [300, 301, 302]),
    _text("prompts", ["The water", "An animal"], n=2, seed=3, temperature=1.2),
    _text("id_prompts", [[300, 301], [302]], echo=True),
    _text("echo", echo=True),
    _text("n_seeded", n=3, seed=7, temperature=1.5, top_p=0.9, top_k=40, min_p=0.01),
    _text("logprobs", logprobs=2, max_tokens=4),
    _text("logprobs_echo", echo=True, logprobs=1, max_tokens=3),
    _text("scored", echo=True, logprobs=1, max_tokens=0),
    _text("prompt_logprobs", prompt_logprobs=2, max_tokens=2),
    _text("logprobs_of_bytes", "<|wave|>", logprobs=1, max_tokens=8),
    _text("logprob_token_ids", logprobs=1, logprob_token_ids=[300, 301], max_tokens=3),
    _text("token_ids", return_token_ids=True, max_tokens=4),
    _text("receipt", receipt=True, seed=5, temperature=1, max_tokens=4),
    _text("stop", "<|count|>", stop=[" five", " nine"], max_tokens=20),
    _text("stop_included", "<|count|>", stop=" five", include_stop_str_in_output=True),
    _text("stop_across_tokens", "<|count|>", stop="our fi", max_tokens=20),
    _text("stop_token_ids", "<|hello|>", stop_token_ids=[725]),
    _text("stop_regex", "<|count|>", stop_regex=" (s|t)e[a-z]+", max_tokens=20),
    _text("ignore_eos", "<|hello|>", ignore_eos=True),
    _text("min_tokens", "<|hello|>", min_tokens=8),
    _text("penalties", frequency_penalty=2, presence_penalty=2, repetition_penalty=2,
          max_tokens=40),
    _text("logit_bias", logit_bias={"300": 100, "301": -100}, max_tokens=4),
    _text("allowed_tokens", allowed_token_ids=[300, 301], max_tokens=4),
    _text("bad_words", bad_words=[" then", " little"]),
    _text("suffix", "The water", suffix=" cold."),
    _text("priority", priority=-5),
    _text("special_tokens", "<|hello|>", skip_special_tokens=False, ignore_eos=True),
    _text("without_effect", user="me", metadata={"a": "b"}, store=True, service_tier="auto",
          best_of=1, model=MODEL),
    _text("regex", regex="(yes|no) [0-9]{2}", max_tokens=20),
    _text("choice", choice=["red", "green"]),
    _text("ebnf", ebnf='root ::= "a" ("b" | "c")+ "d"', seed=2, temperature=1, max_tokens=30),
    _text("json_schema", json_schema=json.dumps(POINT), max_tokens=60),
    _text("guided_json", guided_json=POINT, max_tokens=60),
    _text("structured_outputs", structured_outputs={"regex": "[a-c]{5}"}),
    _text("stream", stream=True),
    _text("stream_usage", stream=True, stream_options={"include_usage": True}),
    _text("stream_usage_in_each", stream=True, max_tokens=4,
          stream_options={"include_usage": True, "continuous_usage_stats": True}),
    _text("stream_n", stream=True, n=2, seed=9, temperature=1, resumable=True),
    _text("stream_logprobs", stream=True, logprobs=1, echo=True, max_tokens=3),
    _text("stream_scored", [[300, 301], [302, 303]], stream=True, echo=True, logprobs=1,
          max_tokens=0, n=2, resumable=True),
    _text("stream_token_ids", stream=True, return_token_ids=True, max_tokens=3),
    _text("stream_stop", "<|count|>", stream=True, stop="our fi", max_tokens=20),
    _text("stream_wave", "<|wave|>", stream=True),
    _text("own_id", HEADERS={"X-Request-Id": "mine.1"}),
    _text("odd_id", HEADERS={"X-Request-Id": "no words"}, max_tokens=1),
    _text("traced", HEADERS={"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}, max_tokens=2),
    _text("model_unknown", model="other"),
    _text("error_type", max_tokens="4"),
    _text("error_range", temperature=-1),
    _text("error_length", max_tokens=5000),
    _text("error_long_prompt", [300] * 1100),
    _text("error_id", [5000]),
    _text("error_no_prompt", LEFT_OUT),
    _text("error_empty_list", []),
    _text("error_mixed", [5, "a"]),
    _text("error_zero", max_tokens=0),
    _text("error_n", n=0),
    _text("error_best_of", best_of=3),
    _text("error_unknown_field", beam_width=2),
    _text("error_near_field", temprature=1),
    _text("error_two_grammars", regex="a", choice=["a"]),
    _text("error_regex", regex="(("),
    _text("error_schema", json_schema='{"type": "horse"}'),
    _text("error_ebnf", ebnf="root ::= nothing"),
    _text("error_stop", stop=[""]),
    _text("error_priority", priority=5000),
    _text("error_suffix_of_ids", [300], suffix="a"),
    _text("error_stream", stream=True, max_tokens=5000),
    _text("error_receipt_stream", stream=True, receipt=True),
    _text("error_prompt_logprobs_stream", stream=True, prompt_logprobs=1),
    _text("error_resumable", resumable=True),
    _text("error_ttft_target", ttft_target=0.0000001, VARY=(r"about ([-+.e\d]+) s",)),
]  # fmt: skip

# --- OpenAI: chat ---------------------------------------------------------------------------------

CHAT = [
    _chat("plain"),
    _chat("hello", "say hello"),
    _chat("think", "say think"),
    _chat("talk", TALK),
    _chat("developer", [{"role": "developer", "content": "Be brief."}, *_user("say hello")]),
    _chat("seeded", seed=11, temperature=1.3, n=2),
    _chat("logprobs", logprobs=True, top_logprobs=2, max_tokens=3),
    _chat("logprob_token_ids", logprobs=True, logprob_token_ids=[300], max_tokens=2),
    _chat("prompt_logprobs", prompt_logprobs=1, max_tokens=1),
    _chat("token_ids", return_token_ids=True, max_tokens=2),
    _chat("receipt", receipt=True, seed=1, temperature=1, max_tokens=2),
    _chat("max_completion_tokens", max_tokens=LEFT_OUT, max_completion_tokens=3),
    _chat("no_reasoning_effort", "say think", reasoning_effort="none"),
    _chat("reasoning_effort", "say think", reasoning_effort="high"),
    _chat("reasoning_left_out", "say think", include_reasoning=False),
    _chat("reasoning_in_content", "say think", separate_reasoning=False),
    _chat("thinking_off", chat_template_kwargs={"enable_thinking": False}),
    _chat("thinking_budget", "say think", thinking_token_budget=2),
    _chat("continued", [*_user("A word?"), {"role": "assistant", "content": "The word is"}],
          continue_final_message=True),
    _chat("no_generation_prompt", add_generation_prompt=False),
    _chat("stop", "say count", stop=" four"),
    _chat("tools_auto_call", "say call", tools=TOOLS, max_tokens=40),
    _chat("tools_auto_both", "say both", tools=TOOLS, max_tokens=40),
    _chat("tools_auto_text", "say hello", tools=TOOLS),
    _chat("tools_cut_off", "say call", tools=TOOLS, max_tokens=7),
    _chat("tools_none", "say call", tools=TOOLS, tool_choice="none", max_tokens=40),
    _chat("tools_required", tools=TOOLS, tool_choice="required", max_tokens=200, seed=3,
          temperature=1),
    _chat("tools_one_call", tools=TOOLS, tool_choice="required", parallel_tool_calls=False,
          max_tokens=200),
    _chat("tools_named", tools=TOOLS, max_tokens=200,
          tool_choice={"type": "function", "function": {"name": "weather"}}),
    _chat("tools_allowed", "say call", tools=TOOLS, max_tokens=200,
          tool_choice={"type": "allowed_tools", "allowed_tools": {
              "mode": "required", "tools": [{"type": "function", "function": {"name": "time"}}]}}),
    _chat("tools_strict", "say call", tools=[STRICT], max_tokens=60),
    _chat("tools_result", CALLED, tools=TOOLS),
    _chat("tools_and_schema", "say hello", tools=TOOLS, max_tokens=60,
          response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": POINT}}),
    _chat("functions", "say call", functions=[FUNCTION], max_tokens=40),
    _chat("function_call", functions=[FUNCTION], function_call={"name": "weather"},
          max_tokens=200),
    _chat("json_object", response_format={"type": "json_object"}, max_tokens=40, seed=4,
          temperature=1),
    _chat("json_schema", max_tokens=60, response_format={
        "type": "json_schema", "json_schema": {"name": "p", "schema": POINT, "strict": True}}),
    _chat("json_after_reasoning", "say think", max_tokens=80, response_format={
        "type": "json_schema", "json_schema": {"name": "p", "schema": POINT}}),
    _chat("structural_tag", "say hello", max_tokens=60, response_format={
        "type": "structural_tag", "triggers": ["<p>"],
        "structures": [{"begin": "<p>", "schema": POINT, "end": "</p>"}]}),
    _chat("regex", regex="[0-9]{3}"),
    _chat("stream", "say think", stream=True),
    _chat("stream_text", stream=True, stream_options={"include_usage": True}),
    _chat("stream_usage_in_each", "say hello", stream=True,
          stream_options={"include_usage": True, "continuous_usage_stats": True}),
    _chat("stream_wave", "say wave", stream=True),
    _chat("stream_n", stream=True, n=2, seed=5, temperature=1, resumable=True),
    _chat("stream_logprobs", stream=True, logprobs=True, top_logprobs=1, max_tokens=2),
    _chat("stream_token_ids", stream=True, return_token_ids=True, max_tokens=2),
    _chat("stream_tools_call", "say call", tools=TOOLS, stream=True, max_tokens=40),
    _chat("stream_tools_both", "say both", tools=TOOLS, stream=True, max_tokens=40,
          stream_options={"include_usage": True}),
    _chat("stream_tools_cut_off", "say call", tools=TOOLS, stream=True, max_tokens=7),
    _chat("stream_tools_required", tools=TOOLS, tool_choice="required", stream=True,
          max_tokens=200, seed=3, temperature=1, resumable=True),
    _chat("stream_functions", "say call", functions=[FUNCTION], stream=True, max_tokens=40),
    _chat("stream_json_schema", stream=True, max_tokens=60, resumable=True, response_format={
        "type": "json_schema", "json_schema": {"name": "p", "schema": POINT, "strict": True}}),
    _chat("stream_stop", "say count", stream=True, stop="our fi"),
    _chat("stream_left", "say count", stream=True, max_tokens=400, LEAVE_AFTER=3),
    _chat("model_unknown", model="gpt-7"),
    _chat("error_no_messages", []),
    _chat("error_role", [{"role": "king", "content": "x"}]),
    _chat("error_content", [{"role": "user", "content": 5}]),
    _chat("error_image", [{"role": "user", "content": [{"type": "image_url"}]}]),
    _chat("error_tool_name", tools=[{"type": "function", "function": {"name": "no way"}}]),
    _chat("error_tool_twice", tools=[TIME, TIME]),
    _chat("error_tool_choice", tool_choice="required"),
    _chat("error_tool_unknown", tools=TOOLS,
          tool_choice={"type": "function", "function": {"name": "f"}}),
    _chat("error_tool_answer", [*_user("x"), {"role": "tool", "tool_call_id": "c", "content": ""}]),
    _chat("error_tool_strict", tools=[{"type": "function", "function": {
        "name": "f", "strict": True, "parameters": {
            "type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}}}]),
    _chat("error_response_format", response_format={"type": "xml"}),
    _chat("error_strict_schema", response_format={
        "type": "json_schema", "json_schema": {"schema": {"type": "horse"}, "strict": True}}),
    _chat("error_top_logprobs", top_logprobs=5),
    _chat("error_template_args", chat_template_kwargs=5),
    _chat("error_both_generation_flags", add_generation_prompt=True, continue_final_message=True),
    _chat("error_audio", modalities=["audio"]),
    _chat("error_budget", thinking_token_budget=-1),
    _chat("error_long", LONG),
]  # fmt: skip

# --- texts and ids, SGLang, llama.cpp -------------------------------------------------------------

TEXTS = [
    Call("tokenize/prompt", "POST /tokenize", {"prompt": "The water is cold 你好."}),
    Call("tokenize/chat", "POST /tokenize", {"messages": TALK, "tools": TOOLS}),
    Call("tokenize/neither", "POST /tokenize", {}),
    Call("tokenize/unknown_model", "POST /tokenize", {"prompt": "a", "model": "other"}),
    Call("detokenize/plain", "POST /detokenize", {"tokens": [300, 301, 725]}),
    Call("detokenize/without_special", "POST /detokenize",
         {"tokens": [300, 725], "skip_special_tokens": True}),
    Call("detokenize/error_id", "POST /detokenize", {"tokens": [5000]}),
    Call("detokenize/error_missing", "POST /detokenize", {}),
    Call("render/chat", "POST /render", {"messages": TALK, "tools": TOOLS}),
    Call("render/tools", "POST /render", {"messages": CALLED, "tools": TOOLS,
                                         "reasoning_effort": "none"}),
    Call("render/prompt", "POST /render", {"prompt": "The water"}),
    Call("render/both", "POST /render", {"prompt": "a", "messages": _user("b")}),
    _generate("text", text="The water is"),
    _generate("ids", input_ids=[300, 301]),
    _generate("list", text=["The water", "An animal"]),
    _generate("n", text="The water", sampling_params={"n": 2, "sampling_seed": 3,
                                                      "max_new_tokens": 4, "temperature": 1}),
    _generate("rid", text="The water", rid="my-rid"),
    _generate("logprobs", text="The water", return_logprob=True, top_logprobs_num=1,
              logprob_start_len=0, token_ids_logprob=[300]),
    _generate("prompt_alone", input_ids=[300, 301, 302], return_logprob=True, logprob_start_len=0,
              sampling_params={"max_new_tokens": 0}),
    _generate("stop", text="<|count|>", sampling_params={"stop": " four", "max_new_tokens": 20}),
    _generate("json_schema", text="a", sampling_params={"json_schema": json.dumps(POINT),
                                                        "max_new_tokens": 60, "temperature": 0}),
    _generate("stream", text="The water", stream=True),
    _generate("stream_logprobs", text="The water", stream=True, return_logprob=True,
              sampling_params={"max_new_tokens": 3, "temperature": 0}),
    _generate("error_both", text="a", input_ids=[1]),
    _generate("error_neither"),
    _generate("error_param", text="a", sampling_params={"no_such": 0}),
    _generate("error_type", text="a", sampling_params={"n": "two"}),
    _generate("error_id", input_ids=[5000]),
    _infill("plain"),
    _infill("extra", input_extra=[{"filename": "a.py", "text": "the sea"}], prompt=" is"),
    _infill("probs", n_probs=2, n_predict=3),
    _infill("fields", response_fields=["content", "timings/prompt_n"]),
    _infill("options", repeat_penalty=1.2, logit_bias=[[300, 5], [301, False]], seed=4,
            n_predict=4),
    _infill("grammar", grammar='root ::= "x"+ "y"', n_predict=5),
    _infill("prompt_alone", n_predict=0),
    _infill("stream", stream=True, n_predict=4),
    _infill("error_missing", input_suffix=LEFT_OUT),
    _infill("error_field", no_such=1),
    _infill("error_model", model="other"),
    _get("llama_cpp/props", "/props"),
    Call("llama_cpp/completion", "POST /completion", {"prompt": "a"}),
]  # fmt: skip

# --- OpenAI: responses and conversations ----------------------------------------------------------

TOOL = {"type": "function", **FUNCTION}
PATCH = {"type": "custom", "name": "patch", "description": "Change files."}
FREE = [TOOL, {"type": "function", "name": "time", "parameters": None}, PATCH]
FORMAT = {"format": {"type": "json_schema", "name": "p", "schema": POINT, "strict": True}}
ENDED = ("status", ("completed", "incomplete", "failed", "cancelled"))
RESPONSES = [
    _response("plain", KEEP={"plain": "id", "plain_item": "output.0.id"}),
    _response("hello", "say hello", KEEP={"hello": "id"}, instructions="Be brief.",
              metadata={"a": "b"}),
    _response("think", "say think"),
    _response("items", [{"role": "user", "content": "Which way?"},
                        {"type": "message", "role": "assistant",
                         "content": [{"type": "output_text", "text": "Over the hill."}]},
                        {"role": "user", "content": [{"type": "input_text", "text": "How far?"}]}]),
    _response("not_stored", store=False),
    _response("own_id", "say hello", HEADERS={"X-Request-Id": "resp-1"}),
    _response("continued", "And then?", previous_response_id="$hello", KEEP={"second": "id"}),
    _response("reference", [{"type": "item_reference", "id": "$plain_item"},
                            {"role": "user", "content": "Again?"}]),
    _response("tools_call", "say call", tools=FREE, max_output_tokens=40,
              KEEP={"called": "id", "call": "output.0.call_id"}),
    _response("tools_output", [{"type": "function_call_output", "call_id": "$call",
                                "output": "Sun."}], previous_response_id="$called", tools=FREE),
    _response("tools_both", "say both", tools=FREE, max_output_tokens=40),
    _response("tools_custom", "say patch", tools=FREE, max_output_tokens=40),
    _response("tools_required", tools=FREE[:1], tool_choice="required", max_output_tokens=200,
              parallel_tool_calls=False),
    _response("tools_named_custom", tools=[PATCH], tool_choice={"type": "custom", "name": "patch"},
              max_output_tokens=40),
    _response("format", text=FORMAT, max_output_tokens=60),
    _response("logprobs", include=["message.output_text.logprobs"], top_logprobs=1,
              max_output_tokens=2),
    _response("no_reasoning", "say think", reasoning={"effort": "none"}),
    _response("truncated", LONG, truncation="auto", max_output_tokens=2),
    _response("without_effect", user="me", service_tier="auto", max_tool_calls=3,
              prompt_cache_key="k", client_metadata={"a": 1}, max_output_tokens=2),
    _response("stream", "say both", tools=FREE, stream=True, max_output_tokens=40,
              KEEP={"streamed": "response.id"}),
    _response("stream_text", stream=True, KEEP={"streamed_text": "response.id"}),
    _response("stream_logprobs", stream=True, include=["message.output_text.logprobs"],
              top_logprobs=1, max_output_tokens=2),
    _response("stream_custom", "say patch", tools=FREE, stream=True, max_output_tokens=40),
    _response("stream_forced", tools=FREE[:1], tool_choice="required", stream=True,
              max_output_tokens=200, parallel_tool_calls=False, resumable=True),
    _response("stream_not_stored", "say hello", stream=True, store=False),
    _get("responses/get", "/v1/responses/$plain"),
    _get("responses/get_streamed", "/v1/responses/$streamed"),
    _get("responses/stream_again", "/v1/responses/$streamed?stream=true"),
    _get("responses/stream_rest", "/v1/responses/$streamed?stream=true&starting_after=20"),
    _get("responses/stream_of_whole", "/v1/responses/$hello?stream=true"),
    _get("responses/stream_past_end", "/v1/responses/$hello?stream=true&starting_after=500"),
    _get("responses/input_items", "/v1/responses/$second/input_items"),
    _get("responses/input_items_page", "/v1/responses/$second/input_items?limit=2&order=asc",
         keep={"first_page": "last_id"}),
    _get("responses/input_items_next",
         "/v1/responses/$second/input_items?limit=2&order=asc&after=$first_page"),
    _get("responses/error_limit", "/v1/responses/$second/input_items?limit=1000"),
    _get("responses/error_order", "/v1/responses/$second/input_items?order=up"),
    _get("responses/error_stream", "/v1/responses/$second?stream=maybe"),
    _get("responses/error_starting_after", "/v1/responses/$second?stream=true&starting_after=x"),
    _get("responses/unknown", "/v1/responses/resp_none"),
    _get("responses/unknown_items", "/v1/responses/resp_none/input_items"),
    Call("responses/cancel_not_background", "POST /v1/responses/$plain/cancel"),
    Call("responses/cancel_unknown", "POST /v1/responses/resp_none/cancel"),
    Call("responses/delete", "DELETE /v1/responses/$plain"),
    Call("responses/delete_again", "DELETE /v1/responses/$plain"),
    _get("responses/deleted", "/v1/responses/$plain"),
    _response("continued_deleted", previous_response_id="$plain"),
    _response("continued_unknown", previous_response_id="resp_none"),
    _response("error_no_input", LEFT_OUT),
    _response("error_item", [{"type": "image", "url": "x"}]),
    _response("error_reference", [{"type": "item_reference", "id": "msg_none"}]),
    _response("error_output", [{"type": "function_call_output", "call_id": "x", "output": ""}]),
    _response("error_server_tool", tools=[{"type": "web_search"}]),
    _response("error_prompt", prompt={"id": "p"}),
    _response("error_n", n=2),
    _response("error_both", previous_response_id="$hello", conversation="conv_none"),
    _response("metadata_of_17", metadata={str(index): "" for index in range(17)}),
    _response("error_schema", text={"format": {"type": "json_schema"}}),
    _response("error_model", model="other"),
    _response("error_long", LONG),
    _response("background", "say both", background=True, tools=FREE, max_output_tokens=40,
              KEEP={"background": "id"}),
    _get("responses/background_ended", "/v1/responses/$background", until=ENDED),
    _get("responses/background_stream", "/v1/responses/$background?stream=true"),
    _get("responses/background_rest", "/v1/responses/$background?stream=true&starting_after=22"),
    Call("responses/background_cancel_ended", "POST /v1/responses/$background/cancel"),
    _response("background_stream_asked", "say hello", background=True, stream=True),
    _response("background_stream_left", "say hello", background=True, stream=True, LEAVE_AFTER=2,
              KEEP={"left": "response.id"}),
    _get("responses/background_left_rest", "/v1/responses/$left?stream=true&starting_after=1"),
    _response("background_too_long", LONG, background=True, KEEP={"failed": "id"}),
    _get("responses/background_failed", "/v1/responses/$failed", until=ENDED),
    _response("background_not_stored", background=True, store=False),
]  # fmt: skip

CONVERSATIONS = [
    Call("conversations/create", "POST /v1/conversations",
         {"items": [{"role": "user", "content": "Which way to the water?"},
                    {"role": "assistant", "content": "Over the hill."}],
          "metadata": {"topic": "water"}}, keep={"conversation": "id"}),
    Call("conversations/create_empty", "POST /v1/conversations", {}, keep={"empty": "id"}),
    _get("conversations/get", "/v1/conversations/$conversation"),
    Call("conversations/update", "POST /v1/conversations/$conversation",
         {"metadata": {"topic": "hills"}}),
    Call("conversations/add", "POST /v1/conversations/$conversation/items",
         {"items": [{"role": "user", "content": "say hello"},
                    {"type": "function_call", "call_id": "c1", "name": "time", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c1", "output": "noon"}]},
         keep={"added": "data.0.id"}),
    _get("conversations/items", "/v1/conversations/$conversation/items"),
    _get("conversations/items_page", "/v1/conversations/$conversation/items?limit=2&order=asc"),
    _get("conversations/item", "/v1/conversations/$conversation/items/$added"),
    _response("in_conversation", "say hello", conversation="$conversation"),
    _response("in_conversation_stream", "say think", conversation={"id": "$conversation"},
              stream=True),
    _get("conversations/items_after", "/v1/conversations/$conversation/items?limit=100"),
    Call("conversations/delete_item", "DELETE /v1/conversations/$conversation/items/$added"),
    _get("conversations/item_gone", "/v1/conversations/$conversation/items/$added"),
    Call("conversations/delete", "DELETE /v1/conversations/$conversation"),
    _get("conversations/deleted", "/v1/conversations/$conversation"),
    _get("conversations/unknown", "/v1/conversations/conv_none"),
    _response("in_unknown_conversation", conversation="conv_none"),
    Call("conversations/error_item", "POST /v1/conversations", {"items": [{"type": "horse"}]}),
    Call("conversations/error_metadata", "POST /v1/conversations", {"metadata": {"a": 1}}),
    Call("conversations/error_update", "POST /v1/conversations/$empty", {}),
]  # fmt: skip

# --- Anthropic ------------------------------------------------------------------------------------

ANTHROPIC_TOOLS = [
    {"name": "weather", "description": "Tell the weather.", "input_schema": CITY},
    {"name": "time", "input_schema": {"type": "object"}},
]
TOOL_TURNS = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "Ask.", "signature": "s"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True,
         "content": [{"type": "text", "text": "no line"}]},
        {"type": "text", "text": "And?"}]},
]  # fmt: skip
MESSAGES = [
    _message("plain"),
    _message("hello", "say hello", HEADERS={"anthropic-version": "2023-06-01"}),
    _message("think", "say think"),
    _message("think_omitted", "say think", max_tokens=50,
             thinking={"type": "enabled", "budget_tokens": 20, "display": "omitted"}),
    _message("think_budget", "say think", max_tokens=40,
             thinking={"type": "enabled", "budget_tokens": 2}),
    _message("think_disabled", thinking={"type": "disabled"}),
    _message("system", system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]),
    _message("continued", [*_user("A word?"), {"role": "assistant", "content": "The word is"}]),
    _message("stop_sequence", "say count", stop_sequences=[" five"]),
    _message("prompt_alone", max_tokens=0),
    _message("tools_call", "say call", tools=ANTHROPIC_TOOLS, max_tokens=40),
    _message("tools_both", "say both", tools=ANTHROPIC_TOOLS, max_tokens=40),
    _message("tools_any", tools=ANTHROPIC_TOOLS, max_tokens=200, temperature=0,
             tool_choice={"type": "any", "disable_parallel_tool_use": True}),
    _message("tools_named", tools=ANTHROPIC_TOOLS, max_tokens=100,
             tool_choice={"type": "tool", "name": "time"}),
    _message("tools_none", "say call", tools=ANTHROPIC_TOOLS, max_tokens=40,
             tool_choice={"type": "none"}),
    _message("tools_cut_off", "say call", tools=ANTHROPIC_TOOLS, max_tokens=8),
    _message("tools_result", TOOL_TURNS, tools=ANTHROPIC_TOOLS),
    _message("format", max_tokens=60,
             output_config={"format": {"type": "json_schema", "schema": POINT}}),
    _message("stream", "say both", tools=ANTHROPIC_TOOLS, stream=True, max_tokens=40),
    _message("stream_text", stream=True),
    _message("stream_stop", "say count", stream=True, stop_sequences=["our fi"]),
    _message("stream_forced", tools=ANTHROPIC_TOOLS, stream=True, max_tokens=200, temperature=0,
             tool_choice={"type": "any", "disable_parallel_tool_use": True}),
    _message("stream_resumable", "say think", stream=True,
             HEADERS={"X-Resumable": "true", "X-Request-Id": "anthropic-1"}),
    _get("messages/stream_resumed", "/v1/streams/anthropic-1?starting_after=4"),
    _message("error_max_tokens", max_tokens=LEFT_OUT),
    _message("error_model", model="claude"),
    _message("error_messages", []),
    _message("error_image", [{"role": "user", "content": [{"type": "image"}]}]),
    _message("error_tool_result", [{"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "x", "content": ""}]}]),
    _message("error_server_tool", tools=[{"type": "web_search_20250305", "name": "web_search"}]),
    _message("error_budget", thinking={"type": "enabled", "budget_tokens": 20}),
    _message("error_thread", thread={"id": "t"}),
    _message("error_field", no_such=1),
    _message("error_long", LONG),
    _message("error_stream_long", LONG, stream=True),
    _count("plain"),
    _count("all", system="Be brief.", tools=ANTHROPIC_TOOLS, thinking={"type": "disabled"}),
    _count("error_field", max_tokens=5),
    _count("error_model", model="claude"),
]  # fmt: skip

# --- Ollama ---------------------------------------------------------------------------------------

OLLAMA = [
    _get("ollama/tags", "/api/tags"),
    _get("ollama/ps", "/api/ps", vary=(r'"size":(\d+)',)),
    _get("ollama/version", "/api/version"),
    Call("ollama/show", "POST /api/show", {"model": "tiny:latest"}),
    Call("ollama/show_name", "POST /api/show", {"name": "tiny"}),
    Call("ollama/show_unknown", "POST /api/show", {"model": "other"}),
    _ollama("chat", "chat", messages=_user("say both"), tools=TOOLS, stream=False,
            options={"num_predict": 40, "temperature": 0}),
    _ollama("chat_stream", "chat", messages=_user("say both"), tools=TOOLS,
            options={"num_predict": 40, "temperature": 0}),
    _ollama("chat_text", "chat", messages=TALK[:2], stream=False),
    _ollama("chat_text_stream", "chat", messages=_user("say think")),
    _ollama("chat_no_think", "chat", messages=_user("say think"), think=False, stream=False),
    _ollama("chat_think", "chat", messages=_user("say think"), think="high", stream=False),
    _ollama("chat_format", "chat", messages=_user("x"), format=POINT, stream=False,
            options={"num_predict": 60, "temperature": 0}),
    _ollama("chat_logprobs", "chat", messages=_user("x"), logprobs=True, top_logprobs=1,
            options={"num_predict": 2, "temperature": 0}),
    _ollama("chat_tool_result", "chat", stream=False, messages=[
        *_user("Weather?"),
        {"role": "assistant", "tool_calls": [
            {"function": {"name": "weather", "arguments": {"city": "Rome"}}}]},
        {"role": "tool", "tool_name": "weather", "content": "Sun."}]),
    _ollama("chat_continued", "chat", stream=False,
            messages=[*_user("A word?"), {"role": "assistant", "content": "The word is"}]),
    _ollama("chat_load", "chat"),
    _ollama("generate", "generate", prompt="say hello", stream=False),
    _ollama("generate_stream", "generate", prompt="Which way?", system="Be brief."),
    _ollama("generate_raw", "generate", prompt="The water is", raw=True, stream=False),
    _ollama("generate_suffix", "generate", prompt="The water", suffix=" cold.", stream=False),
    _ollama("generate_context", "generate", prompt="say hello", context=[], stream=False,
            KEEP={"context": "context"}),
    _ollama("generate_context_next", "generate", prompt="And?", context="$context", stream=False),
    _ollama("generate_options", "generate", prompt="x", raw=True, stream=False, options={
        "seed": 3, "temperature": 1.1, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "num_predict": 5,
        "repeat_penalty": 1.2, "stop": ["zz"], "num_ctx": 512, "no_such_option": 1, "mirostat": 1}),
    _ollama("generate_load", "generate", stream=False),
    _ollama("error_model", "chat", model="other", messages=_user("x")),
    _ollama("error_no_model", "generate", model="", prompt="x"),
    _ollama("error_images", "generate", prompt="x", images=["AAAA"]),
    _ollama("error_template", "generate", prompt="x", template="t"),
    _ollama("error_field", "generate", prompt="x", no_such=1),
    _ollama("error_type", "chat", messages="x"),
    _ollama("error_typical_p", "generate", prompt="x", options={"typical_p": 0.5}),
    _ollama("error_tool_answer", "chat", messages=[{"role": "tool", "content": "Sun."}]),
    _ollama("error_long", "generate", prompt=LONG),
    Call("ollama/embed", "POST /api/embed", {"model": MODEL, "input": "x"}),
    Call("ollama/pull", "POST /api/pull", {"model": "x"}),
    Call("ollama/delete", "DELETE /api/delete", {"model": "x"}),
    Call("ollama/wrong_method", "POST /api/tags", {}),
]  # fmt: skip

# --- resumable streams, traces, aborts ------------------------------------------------------------

STREAMS = [
    _chat("resumable", "say think", stream=True, resumable=True,
          HEADERS={"X-Request-Id": "stream-1"}),
    _get("streams/whole", "/v1/streams/stream-1"),
    _get("streams/by_answer_id", "/v1/streams/chatcmpl-stream-1"),
    _get("streams/after_header", "/v1/streams/stream-1", headers={"Last-Event-ID": "3"}),
    _get("streams/after_query", "/v1/streams/stream-1?starting_after=6"),
    _get("streams/at_end", "/v1/streams/stream-1?starting_after=9"),
    _get("streams/past_end", "/v1/streams/stream-1?starting_after=500"),
    _get("streams/error_number", "/v1/streams/stream-1?starting_after=x"),
    _chat("resumable_again", "say think", stream=True, resumable=True,
          HEADERS={"X-Request-Id": "stream-1", "Last-Event-ID": "4"}),
    _chat("resumable_other_body", "say hello", stream=True, resumable=True,
          HEADERS={"X-Request-Id": "stream-1"}),
    _text("resumable_left", "<|count|>", stream=True, max_tokens=30, LEAVE_AFTER=2,
          HEADERS={"X-Request-Id": "stream-2", "X-Resumable": "true"}),
    _get("streams/left_rest", "/v1/streams/stream-2", headers={"Last-Event-ID": "2"}),
    _response("resumable", "say both", stream=True, resumable=True, tools=FREE,
              max_output_tokens=40, HEADERS={"X-Request-Id": "stream-3"}),
    _get("streams/response_rest", "/v1/streams/stream-3?starting_after=15"),
    _text("resumable_own_id", stream=True, resumable=True, max_tokens=3,
          KEEP={"own_stream": "header:X-Stream-Id"}),
    _get("streams/own_id", "/v1/streams/$own_stream"),
    Call("streams/delete", "DELETE /v1/streams/stream-1"),
    _get("streams/deleted", "/v1/streams/stream-1"),
    Call("streams/delete_unknown", "DELETE /v1/streams/none"),
    _get("streams/unknown", "/v1/streams/none"),
    _get("streams/not_resumable", "/v1/streams/mine.1"),
    _chat("resumable_error", stream=True, resumable=True, max_tokens=5000),
    _get("traces/by_id", "/v1/requests/cmpl-mine.1/trace", shape=True),
    _get("traces/by_request_id", "/v1/requests/stream-3/trace", shape=True),
    _get("traces/unknown", "/v1/requests/none/trace"),
    Call("abort/unknown", "POST /abort_request", {"rid": "none"}),
    Call("abort/neither", "POST /abort_request", {}),
    Call("abort/all", "POST /abort_request", {"abort_all": True}),
    Call("flush_cache/all", "POST /flush_cache", vary=(r'"flushed_pages":(\d+)',)),
    Call("flush_cache/again", "POST /flush_cache"),
    _text("after_flush"),
]  # fmt: skip

# --- files and batches ----------------------------------------------------------------------------

CHAT_LINES = _lines(
    "/v1/chat/completions",
    {"messages": _user("say hello"), **GREEDY},
    {"messages": _user("say call"), "tools": TOOLS, "temperature": 0, "max_tokens": 40},
    {"messages": _user("x"), "model": "other"},
    {"messages": [], **GREEDY},
)
TEXT_LINES = _lines("/v1/completions", {"prompt": "The water is", **GREEDY, "logprobs": 1})
RESPONSE_LINES = _lines("/v1/responses", {"input": "say both", "max_output_tokens": 40},
                        {"input": "x", "previous_response_id": "$hello"},
                        {"input": "x", "background": True})  # fmt: skip
BROKEN_LINES = 'no json\n{"custom_id": "a"}\n' + _lines(
    "/v1/completions", {"prompt": "x", "stream": True}, {"prompt": "y"}
) + _lines("/v1/completions", {"prompt": "x"}) + _lines("/v1/chat/completions", {})  # fmt: skip
ODD_REQUESTS: list[dict[str, Any]] = [
    {"custom_id": "a" * 600, "body": {}},
    {"custom_id": "b", "body": 5},
    {"custom_id": "c", "method": "GET", "body": {}},
    {"custom_id": "d", "body": {"prompt": "x"}},
    {"custom_id": "d", "body": {"prompt": "x"}},
]
ODD_LINES = "\ufeff\n" + "".join(
    json.dumps({"method": "POST", "url": "/v1/completions", **fields}) + "\n"
    for fields in ODD_REQUESTS
)


def _upload(name: str, text: str, key: str, **fields: Any) -> Call:
    return Call(f"files/{name}", "POST /v1/files", _form(text), FORM, keep={key: "id"}, **fields)


def _batch(name: str, file: str, endpoint: str, key: str, **fields: Any) -> list[Call]:
    """Return the calls that start a batch, and wait for its end."""
    body = {"input_file_id": f"${file}", "endpoint": endpoint, "completion_window": "24h"}
    start = _post(f"batches/{name}", "/v1/batches", body, {**fields, "KEEP": {key: "id"}})
    ended = ("status", ("completed", "failed", "cancelled"))
    keep = {f"{key}_output": "output_file_id", f"{key}_errors": "error_file_id"}
    return [start, _get(f"batches/{name}_ended", f"/v1/batches/${key}", until=ended, keep=keep)]


FILES = [
    _upload("chats", CHAT_LINES, "chats"),
    _upload("texts", TEXT_LINES, "texts", pause_s=1),
    _get("files/list", "/v1/files"),
    _get("files/page", "/v1/files?limit=1&order=asc", keep={"first_file": "last_id"}),
    _get("files/next_page", "/v1/files?limit=1&order=asc&after=$first_file"),
    _get("files/get", "/v1/files/$chats"),
    _get("files/content", "/v1/files/$chats/content"),
    *_batch("chats", "chats", "/v1/chat/completions", "chat_batch", metadata={"a": "b"}),
    _get("files/chat_output", "/v1/files/$chat_batch_output/content"),
    _get("files/chat_errors", "/v1/files/$chat_batch_errors/content"),
    _get("files/output_object", "/v1/files/$chat_batch_output", vary=(r'"bytes":(\d+)',)),
    *_batch("texts", "texts", "/v1/completions", "text_batch", PAUSE_S=1),
    _get("files/text_output", "/v1/files/$text_batch_output/content"),
    _get("batches/list", "/v1/batches"),
    _get("batches/page", "/v1/batches?limit=1"),
    _get("batches/next_page", "/v1/batches?limit=1&after=$text_batch"),
    _upload("responses", RESPONSE_LINES, "response_lines"),
    *_batch("responses", "response_lines", "/v1/responses", "response_batch"),
    _get("files/response_output", "/v1/files/$response_batch_output/content"),
    _get("files/response_errors", "/v1/files/$response_batch_errors/content"),
    _upload("broken", BROKEN_LINES, "broken"),
    *_batch("broken", "broken", "/v1/completions", "broken_batch"),
    _upload("empty", "", "empty_file"),
    *_batch("empty", "empty_file", "/v1/completions", "empty_batch"),
    _get("batches/unknown", "/v1/batches/batch_none"),
    Call("batches/cancel_ended", "POST /v1/batches/$chat_batch/cancel"),
    Call("batches/cancel_unknown", "POST /v1/batches/batch_none/cancel"),
    Call("batches/error_endpoint", "POST /v1/batches",
         {"input_file_id": "$chats", "endpoint": "/v1/moderations", "completion_window": "24h"}),
    Call("batches/error_file", "POST /v1/batches",
         {"input_file_id": "file-none", "endpoint": "/v1/completions",
          "completion_window": "24h"}),
    Call("batches/error_output_as_input", "POST /v1/batches",
         {"input_file_id": "$chat_batch_output", "endpoint": "/v1/completions",
          "completion_window": "24h"}),
    Call("batches/error_window", "POST /v1/batches",
         {"input_file_id": "$chats", "endpoint": "/v1/completions", "completion_window": "1h"}),
    Call("files/delete", "DELETE /v1/files/$chats"),
    Call("files/delete_again", "DELETE /v1/files/$chats"),
    _get("files/unknown", "/v1/files/file-none"),
    _get("files/unknown_content", "/v1/files/file-none/content"),
    Call("files/error_purpose", "POST /v1/files", _form("x", purpose="vision"), FORM),
    Call("files/error_no_purpose", "POST /v1/files", _form("x", purpose=None), FORM),
    Call("files/error_no_form", "POST /v1/files", {}),
    _get("files/error_limit", "/v1/files?limit=x"),
]  # fmt: skip

# --- errors of HTTP -------------------------------------------------------------------------------

WHOLE = '{"prompt":"The water is","max_tokens":2,"temperature":0}'
CHUNKS = 'b\r\n{"prompt": \r\n5\r\n"sea"\r\n1\r\n}\r\n0\r\n\r\n'
STREAMED = '{"prompt":"The water is","max_tokens":2,"temperature":0,"stream":true}'
POSTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate",
         "/infill", "/api/chat", "/tokenize")  # fmt: skip
JSON_ERRORS = [
    Call(f"errors/bad_json_{path.strip('/').replace('/', '_')}", f"POST {path}", b'{"prompt": ')
    for path in POSTS
]
ERRORS = [
    *JSON_ERRORS,
    Call("errors/empty_body", "POST /v1/completions", b""),
    Call("errors/array", "POST /v1/completions", b"[]"),
    Call("errors/no_utf8", "POST /v1/completions", b'{"prompt": "\xff\xfe"}'),
    Call("errors/surrogate", "POST /v1/completions", b'{"prompt": "\\ud800"}'),
    Call("errors/deep", "POST /v1/completions", b'{"prompt": ' + b"[" * 2000 + b"]" * 2000 + b"}"),
    Call("errors/large_integer", "POST /v1/completions",
         b'{"prompt": "a", "seed": 99999999999999999999999}'),
    Call("errors/large_number", "POST /v1/completions", b'{"prompt": "a", "temperature": 1e999}'),
    Call("errors/odd_spaces", "POST /v1/completions",
         b' {\n"prompt":\t"The water is" , "max_tokens":3,"temperature":0.0} '),
    Call("errors/many_values", "POST /v1/completions",
         b'{"prompt": [' + b"[]," * 140_000 + b"[]]}"),
    _get("errors/no_endpoint", "/v1/none"),
    Call("errors/no_embeddings", "POST /v1/embeddings", {"input": "a"}),
    _get("errors/wrong_method", "/v1/chat/completions"),
    Call("errors/wrong_method_delete", "DELETE /v1/files"),
    Call("errors/wrong_method_put", "PUT /v1/responses/x", {}),
    Call("errors/options", "OPTIONS /v1/completions", headers={
        "Origin": PAGE, "Access-Control-Request-Method": "POST"}),
    _get("errors/foreign_origin", "/v1/models", headers={"Origin": PAGE}),
    _get("errors/foreign_site", "/v1/models", headers={"Sec-Fetch-Site": "cross-site"}),
    _get("errors/own_origin", "/livez", headers={"Origin": "null"}),
    _get("errors/unknown_host", "/v1/models", headers={"Host": "rebound.example"}),
    Call("errors/coding", "POST /v1/completions", b"x", {"Content-Encoding": "br"}),
    Call("errors/no_gzip", "POST /v1/completions", b"no gzip", {"Content-Encoding": "gzip"}),
    Call("errors/expect", "POST /v1/completions", b"{}", {"Expect": "a-miracle"}),
    _raw("errors/no_http", "GET"),
    _raw("errors/http_1_0", "POST /v1/completions HTTP/1.0", body=WHOLE),
    _raw("errors/http_1_0_stream", "POST /v1/completions HTTP/1.0", body=STREAMED),
    _raw("errors/expect_continue", "POST /v1/completions HTTP/1.1", "Host: localhost",
         "Expect: 100-continue", body=WHOLE),
    _raw("errors/chunked_body", "POST /tokenize HTTP/1.1", "Host: localhost",
         "Transfer-Encoding: chunked", body=CHUNKS),
    _raw("errors/broken_chunks", "POST /tokenize HTTP/1.1", "Host: localhost",
         "Transfer-Encoding: chunked", body="zz\r\n"),
    Call("errors/gzip", "POST /tokenize", gzip.compress(b'{"prompt": "The sea"}', mtime=0),
         {"Content-Encoding": "gzip"}),
    _raw("errors/long_header", "GET /livez HTTP/1.1", "Host: localhost", "X-Long: " + "a" * 20_000),
    _raw("errors/bad_length", "POST /tokenize HTTP/1.1", "Host: localhost", "Content-Length: x"),
]  # fmt: skip

# --- tenants, keys, bounds ------------------------------------------------------------------------

ASK = {"prompt": "The water is", "max_tokens": 4, "temperature": 0}


def _keyed(name: str, target: str, body: Any = None, tenant: str = "alice", **fields: Any) -> Call:
    headers = {**_key(tenant), **fields.pop("headers", {})}
    return Call(f"tenants/{name}", target, body, headers, "keys", **fields)


def _bounded(name: str, target: str, body: Any = None, **fields: Any) -> Call:
    headers = {**SERVERS["keys"].headers, **fields.pop("headers", {})}
    return Call(f"bounds/{name}", target, body, headers, "keys", **fields)


WAIT = (r"X-Expected-Wait: ([\d.]+)", r'"expected_wait":([\d.]+)', r"Retry-After: (\d+)",
        r"try again in ([\d.]+) s")  # fmt: skip
BACKGROUND = {"input": "say hello", "background": True, "max_output_tokens": 12}
BATCH = {"input_file_id": "$file_here", "endpoint": "/v1/completions", "completion_window": "24h"}
STREAM = {**ASK, "stream": True, "resumable": True}


def _named(request_id: str) -> dict[str, str]:
    return {"X-Request-Id": request_id}


# What happens to requests that wait behind others.
WAITING = [
    _bounded("aborted", "POST /v1/completions", ASK, headers=_named("wait-1"),
             fillers=(4,), during=(
        _bounded("trace_of_open", "GET /v1/requests/wait-1/trace"),
        _bounded("abort", "POST /abort_request", {"rid": "wait-1"}),
    )),
    _bounded("aborted_chat_stream", "POST /v1/chat/completions",
             {"messages": _user("x"), "stream": True, "stream_options": {"include_usage": True}},
             headers=_named("wait-2"), fillers=(4,), during=(
        _bounded("abort_by_answer_id", "POST /abort_request", {"rid": "chatcmpl-wait-2"}),
    )),
    _bounded("aborted_message_stream", "POST /v1/messages",
             {"model": MODEL, "max_tokens": 2, "messages": _user("x"), "stream": True},
             headers=_named("wait-3"), fillers=(4,), during=(
        _bounded("abort_message", "POST /abort_request", {"rid": "wait-3"}),
    )),
    _bounded("aborted_response_stream", "POST /v1/responses", {"input": "x", "stream": True},
             headers=_named("wait-4"), fillers=(4,), during=(
        _bounded("abort_response", "POST /abort_request", {"rid": "wait-4"}),
    )),
    _bounded("aborted_ollama", "POST /api/chat", {"model": MODEL, "messages": _user("x")},
             headers=_named("wait-5"), fillers=(4,), during=(
        _bounded("abort_ollama", "POST /abort_request", {"rid": "wait-5"}),
    )),
    _bounded("aborted_generate", "POST /generate", {"text": "x", "rid": "wait-6"},
             fillers=(4,), during=(
        _bounded("rid_in_use", "POST /generate", {"text": "y", "rid": "wait-6"}),
        _bounded("abort_generate", "POST /abort_request", {"rid": "wait-6"}),
    )),
    _bounded("aborted_infill", "POST /infill", {"input_prefix": "a", "input_suffix": "b"},
             headers=_named("wait-7"), fillers=(4,), during=(
        _bounded("abort_of_tenant", "POST /abort_request", {"rid": "wait-7"},
                 headers=_key("alice")),
        _bounded("abort_infill", "POST /abort_request", {"rid": "wait-7"}),
    )),
    _bounded("stream_deleted", "POST /v1/completions", STREAM, headers=_named("wait-8"),
             fillers=(4,), during=(
        _bounded("too_many_streams", "POST /v1/completions", STREAM),
        _bounded("delete_stream", "DELETE /v1/streams/wait-8"),
    )),
    _bounded("behind_background", "POST /v1/completions", ASK, headers=_named("wait-10"),
             fillers=(2,), during=(
        _bounded("background", "POST /v1/responses", BACKGROUND, keep={"waits": "id"}),
        _bounded("background_second", "POST /v1/responses", BACKGROUND, keep={"also": "id"}),
        _bounded("background_third", "POST /v1/responses", BACKGROUND),
        _bounded("background_continued", "POST /v1/responses",
                 {"input": "x", "previous_response_id": "$waits"}),
        _bounded("background_cancel", "POST /v1/responses/$waits/cancel"),
        _bounded("background_cancelled", "GET /v1/responses/$waits"),
        _bounded("background_cancelled_stream", "GET /v1/responses/$waits?stream=true"),
        _bounded("background_delete", "DELETE /v1/responses/$also"),
        _bounded("background_deleted", "GET /v1/responses/$also"),
        _bounded("abort_behind", "POST /abort_request", {"rid": "wait-10"}),
    )),
    _bounded("behind_tenant", "POST /v1/completions", ASK, headers={**_key("carol"), **_named("w")},
             fillers=(2,), during=(
        _bounded("too_many_open", "POST /v1/completions", ASK, headers=_key("carol"), vary=WAIT),
        _bounded("too_many_open_stream", "POST /v1/messages",
                 {"model": MODEL, "max_tokens": 2, "messages": _user("x"), "stream": True},
                 headers=_key("carol"), vary=WAIT),
        _bounded("abort_own", "POST /abort_request", {"rid": "w"}, headers=_key("carol")),
    )),
    _bounded("file", "POST /v1/files", _form(TEXT_LINES), headers=FORM, keep={"file_here": "id"}),
    _bounded("behind_batches", "POST /v1/completions", ASK, headers=_named("wait-11"),
             fillers=(2,), during=(
        _bounded("batch", "POST /v1/batches", BATCH, keep={"batch_one": "id"}),
        _bounded("batch_second", "POST /v1/batches", BATCH, keep={"batch_two": "id"}),
        _bounded("batch_third", "POST /v1/batches", BATCH, keep={"batch_three": "id"}),
        _bounded("batch_waits", "GET /v1/batches/$batch_one", until=("status", ("in_progress",))),
        _bounded("file_in_use", "DELETE /v1/files/$file_here"),
        _bounded("batch_cancel", "POST /v1/batches/$batch_one/cancel", pause_s=0.5),
        _bounded("batch_cancelled", "GET /v1/batches/$batch_one", until=("status", ("cancelled",))),
        _bounded("batch_second_cancel", "POST /v1/batches/$batch_two/cancel"),
        _bounded("batch_second_cancelled", "GET /v1/batches/$batch_two",
                 until=("status", ("cancelled",))),
        _bounded("abort_behind_batches", "POST /abort_request", {"rid": "wait-11"}),
    )),
    _bounded("batch_third_completed", "GET /v1/batches/$batch_three",
             until=("status", ("completed",))),
    _bounded("stream_1", "POST /v1/completions", STREAM, headers=_named("kept-1")),
    _bounded("stream_2", "POST /v1/completions", STREAM, headers=_named("kept-2")),
    _bounded("stream_3", "POST /v1/completions", STREAM, headers=_named("kept-3")),
    _bounded("stream_expired", "GET /v1/streams/kept-1"),
    _bounded("stream_kept", "GET /v1/streams/kept-3?starting_after=4"),
    _bounded("live", "GET /v1/live", fillers=(2,), leave_after=5, shape=True),
    _bounded("flush_cache", "POST /flush_cache", vary=(r'"flushed_pages":(\d+)',)),
    _bounded("what_if", "GET /v1/what_if", shape=True),
    _bounded("metrics", "GET /metrics"),
]  # fmt: skip
TENANT_CALLS = [
    Call("tenants/no_key", "GET /v1/models", server="keys"),
    Call("tenants/no_key_anthropic", "POST /v1/messages", {"max_tokens": 1}, server="keys"),
    Call("tenants/no_key_ollama", "GET /api/tags", server="keys"),
    Call("tenants/no_key_probe", "GET /health", server="keys"),
    Call("tenants/no_key_page", "GET /", headers={"Accept": "text/html"}, server="keys"),
    Call("tenants/wrong_key", "GET /v1/models", headers={"X-Api-Key": "none"}, server="keys"),
    Call("tenants/api_key_header", "GET /v1/models", headers={"X-Api-Key": "alice-key"},
         server="keys"),
    Call("tenants/preflight", "OPTIONS /v1/completions", server="keys", headers={
        "Origin": PAGE, "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization"}),
    _keyed("allowed_origin", "GET /v1/models", headers={"Origin": PAGE}),
    _keyed("other_origin", "GET /v1/models", headers={"Origin": "https://evil.example"}),
    _keyed("page", "GET /", headers={"Accept": "text/html"}),
    _keyed("completion", "POST /v1/completions", ASK),
    _keyed("user", "POST /v1/completions", {**ASK, "user": "u1"}),
    _keyed("user_header", "POST /v1/chat/completions", {"messages": _user("say hello")},
           headers={"X-Quadriga-User": "u2"}),
    _keyed("server_info", "GET /server_info", shape=True),
    _keyed("metrics", "GET /metrics"),
    _keyed("live", "GET /v1/live"),
    _keyed("what_if", "GET /v1/what_if"),
    _keyed("flush_cache", "POST /flush_cache"),
    _keyed("response", "POST /v1/responses", {"input": "say hello"}, keep={"of_alice": "id"}),
    _keyed("response_of_other", "GET /v1/responses/$of_alice", tenant="carol"),
    _keyed("response_continued_by_other", "POST /v1/responses",
           {"input": "x", "previous_response_id": "$of_alice"}, tenant="carol"),
    _keyed("conversation", "POST /v1/conversations", {}, keep={"conv_of_alice": "id"}),
    _keyed("conversation_of_other", "GET /v1/conversations/$conv_of_alice", tenant="carol"),
    _keyed("stream", "POST /v1/completions", {**ASK, "stream": True, "resumable": True},
           headers={"X-Request-Id": "alice-1"}),
    _keyed("stream_of_other", "GET /v1/streams/alice-1", tenant="carol"),
    _keyed("trace_of_other", "GET /v1/requests/alice-1/trace", tenant="carol"),
    _keyed("file", "POST /v1/files", _form(TEXT_LINES), headers=FORM, keep={"file_of_alice": "id"}),
    _keyed("file_of_other", "GET /v1/files/$file_of_alice", tenant="carol"),
    _keyed("files_of_other", "GET /v1/files", tenant="carol"),
    _keyed("batch_of_others_file", "POST /v1/batches",
           {"input_file_id": "$file_of_alice", "endpoint": "/v1/completions",
            "completion_window": "24h"}, tenant="carol"),
    _keyed("priority", "POST /v1/completions", {**ASK, "priority": 5}, tenant="bob"),
    _keyed("within_rate", "POST /v1/completions", {**ASK, "priority": -20}, tenant="bob"),
    _keyed("over_rate", "POST /v1/completions", ASK, tenant="bob", vary=WAIT),
    _keyed("over_rate_anthropic", "POST /v1/messages",
           {"model": MODEL, "max_tokens": 2, "messages": _user("x")}, tenant="bob", vary=WAIT),
    _keyed("over_tokens", "POST /v1/completions", {"prompt": [300] * 30, "max_tokens": 1},
           tenant="dave"),
    _keyed("file_too_large", "POST /v1/files", _form("x" * 400), headers=FORM, tenant="dave"),
    _keyed("other_model", "POST /v1/completions", ASK, tenant="erin"),
    _bounded("body_too_large", "POST /v1/completions", {"prompt": "a" * 5000}),
    _bounded("body_too_large_anthropic", "POST /v1/messages", {"system": "a" * 5000}),
    _bounded("body_too_large_ollama", "POST /api/generate", {"prompt": "a" * 5000}),
    _bounded("file_too_large", "POST /v1/files", _form("x" * 2100), headers=FORM),
    _bounded("queue_full", "POST /v1/completions", ASK, fillers=(4, 5), vary=WAIT),
    _bounded("queue_full_stream", "POST /v1/chat/completions",
             {"messages": _user("x"), "stream": True}, fillers=(4, 5), vary=WAIT),
    _bounded("queue_full_anthropic", "POST /v1/messages",
             {"model": MODEL, "max_tokens": 2, "messages": _user("x")}, fillers=(4, 5), vary=WAIT),
    _bounded("queue_full_ollama", "POST /api/chat", {"model": MODEL, "messages": _user("x")},
             fillers=(4, 5), vary=WAIT),
    _bounded("queue_full_llama_cpp", "POST /infill", {"input_prefix": "a", "input_suffix": "b"},
             fillers=(4, 5), vary=WAIT),
]  # fmt: skip

# --- a base model, replicas, no store -------------------------------------------------------------


def _based(name: str, target: str, body: Any = None, **fields: Any) -> Call:
    return Call(f"base/{name}", target, body, server="base", **fields)


BASE_CALLS = [
    _based("completion", "POST /v1/completions", ASK),
    _based("completion_of_second_replica", "POST /v1/completions", ASK),
    _based("cached", "POST /v1/completions", {**ASK, "prompt": [300] * 40}),
    _based("stream", "POST /v1/completions", {**ASK, "stream": True},
           headers={"X-Request-Id": "base-1", "X-Resumable": "true"}),
    _based("stream_resumed", "GET /v1/streams/base-1?starting_after=2"),
    _based("stream_not_resumable", "POST /v1/completions", {**ASK, "stream": True},
           headers={"X-Resumable": "false"}),
    _based("truncated", "POST /v1/completions", {**ASK, "prompt": [300] * 200}),
    _based("no_template", "POST /v1/chat/completions", {"messages": _user("x")}),
    _based("no_template_anthropic", "POST /v1/messages",
           {"model": MODEL, "max_tokens": 2, "messages": _user("x")}),
    _based("no_template_response", "POST /v1/responses", {"input": "x"}),
    _based("ollama_generate", "POST /api/generate",
           {"model": MODEL, "prompt": "The water is", "stream": False,
            "options": {"temperature": 0}}),
    _based("ollama_show", "POST /api/show", {"model": MODEL}),
    _based("models", "GET /v1/models"),
    _based("page", "GET /", headers={"Accept": "text/html"}),
    _based("unknown_host", "GET /v1/models", headers={"Host": "other.example"}),
    _based("known_host", "GET /livez", headers={"Host": "llm.example.org"}),
    _based("no_responses", "GET /v1/responses/resp_x"),
    _based("no_background", "POST /v1/responses", {"input": "x", "background": True}),
    _based("no_conversations", "POST /v1/conversations", {}),
    _based("no_files", "GET /v1/files"),
    _based("no_batches", "POST /v1/batches", {"input_file_id": "f", "endpoint": "/v1/completions",
                                              "completion_window": "24h"}),
    _based("no_ui", "GET /ui/app.js"),
    _based("server_info", "GET /server_info", shape=True),
    _based("metrics", "GET /metrics"),
    _based("live_second_replica", "GET /v1/live?replica=1", leave_after=1, shape=True),
    _based("ollama_system", "POST /api/generate", {"model": MODEL, "prompt": "x", "system": "s"}),
    _based("render", "POST /render", {"messages": _user("x")}),
    _based("count_tokens", "POST /v1/messages/count_tokens",
           {"model": MODEL, "messages": _user("x")}),
    _based("live_unknown_replica", "GET /v1/live?replica=5"),
    _based("live_no_number", "GET /v1/live?replica=x"),
    _based("what_if", "GET /v1/what_if", shape=True),
]  # fmt: skip

# --- what has happened ----------------------------------------------------------------------------

PAST = [
    _get("live/first", "/v1/live", leave_after=1, shape=True),
    _get("what_if/load", "/v1/what_if", shape=True),
    Call(
        "what_if/simulated",
        "POST /v1/what_if",
        {"variants": [{"name": "4 slots", "flags": {"max_running_requests": 4}}]},
        shape=True,
    ),
    Call(
        "what_if/error_flag",
        "POST /v1/what_if",
        {"variants": [{"name": "a", "flags": {"port": 1}}]},
    ),
    Call(
        "what_if/error_value",
        "POST /v1/what_if",
        {"variants": [{"name": "a", "flags": {"dp": "many"}}]},
    ),
    Call(
        "what_if/error_choice",
        "POST /v1/what_if",
        {"variants": [{"name": "a", "flags": {"batch_mode": "none"}}]},
    ),
    Call(
        "what_if/error_largest",
        "POST /v1/what_if",
        {"variants": [{"name": "a", "flags": {"dp": 1000}}]},
    ),
    Call(
        "what_if/error_variants",
        "POST /v1/what_if",
        {"variants": [{"name": str(index)} for index in range(7)]},
    ),
    Call("what_if/error_long_name", "POST /v1/what_if", {"variants": [{"name": "a" * 41}]}),
    Call("what_if/error_last_s", "POST /v1/what_if", {"last_s": -1}),
    Call("what_if/error_names", "POST /v1/what_if", {"variants": [{"name": "a"}, {"name": "a"}]}),
    _get("metrics/all", "/metrics"),
]

# --- other forms of calls -------------------------------------------------------------------------

NOTE = {"type": "function", "function": {"name": "note", "parameters": {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "tags": {"type": "array", "items": {"type": ["string", "null"]}, "maxItems": 2},
        "unit": {"anyOf": [{"const": "C"}, {"type": "null"}]},
        "at": {"$ref": "#/$defs/at"},
    },
    "required": ["text"],
    "$defs": {"at": {"enum": [1, 2.5, "noon"]}},
}}}  # fmt: skip
PATTERN = {"type": "function", "function": {"name": "mark", "strict": True, "parameters": {
    "type": "object", "properties": {"word": {"type": "string", "pattern": "^[a-c]{2,3}$"}},
    "required": ["word"], "additionalProperties": False}}}  # fmt: skip


def _styled(style: str) -> list[Call]:
    def chat(name: str, text: str | list[Any] = "say call", /, **fields: Any) -> Call:
        messages = _user(text) if isinstance(text, str) else text
        body = {"messages": messages, "tools": [WEATHER, NOTE], "temperature": 0, "max_tokens": 60}
        given = {"SERVER": style, **fields}
        return _post(f"styles/{style}_{name}", "/v1/chat/completions", body, given)

    forced = {"tool_choice": "required", "max_tokens": 200, "seed": 1, "temperature": 1}
    return [
        chat("call"),
        chat("stream", stream=True),
        chat("cut_off", max_tokens=9),
        chat("text", "say hello"),
        chat("think", "say think"),
        chat("no_tools", tools=LEFT_OUT),
        chat("result", CALLED, max_tokens=4),
        chat("forced", "x", **forced),
        chat("forced_stream", "x", **forced, stream=True, resumable=True),
        chat("forced_note", "x", **{**forced, "tool_choice": {"type": "function", "function": {
            "name": "note"}}}),
        chat("forced_pattern", "x", tools=[PATTERN], **forced),
        chat("strict_pattern", "x", tools=[PATTERN]),
        chat("strict", "x", tools=[STRICT], max_tokens=8),
        chat("schema", "x", max_tokens=80, response_format={
            "type": "json_schema", "json_schema": {"name": "p", "schema": POINT}}),
        chat("regex", "x", tools=LEFT_OUT, regex="[a-c]{3}"),
        _post(f"styles/{style}_message", "/v1/messages", {
            "model": MODEL, "messages": _user("say call"), "max_tokens": 60, "stream": True,
            "tools": ANTHROPIC_TOOLS}, {"SERVER": style}),
        _post(f"styles/{style}_response", "/v1/responses", {
            "input": "say call", "max_output_tokens": 60, "tools": FREE}, {"SERVER": style}),
        _post(f"styles/{style}_ollama", "/api/chat", {
            "model": MODEL, "messages": _user("say call"), "tools": TOOLS}, {"SERVER": style}),
        _get(f"styles/{style}_model", "/v1/models", server=style),
    ]  # fmt: skip


def _late(name: str, path: str, body: Any, **fields: Any) -> Call:
    return Call(f"late/{name}", f"POST {path}", body, server="llama3_json", **fields)


# Requests that wait longer than --queue-timeout, at one time.
LATE = [
    _late(
        "completion", "/v1/completions", {"prompt": "x", "max_tokens": 2}, fillers=(1,), during=(
            _late("chat_stream", "/v1/chat/completions", {"messages": _user("x"), "stream": True},
                  during=(
                      _late("message", "/v1/messages",
                            {"model": MODEL, "messages": _user("x"), "max_tokens": 2}, during=(
                                _late("ollama", "/api/generate", {"model": MODEL, "prompt": "x"}),
                            )),
                  )),
        ),
    ),
]  # fmt: skip
STYLE_CALLS = [call for style in STYLES for call in _styled(style)]

# --- errors after the begin of an answer ----------------------------------------------------------

# The text before an error may or may not be sent.
CUT = (r"(?m)^id: (\d+)", r'"sequence_number":(\d+)', r'"text":"([^"]*)"')
BREAKING: dict[str, Any] = {"SERVER": "qwen3_coder", "VARY": CUT}
LENGTH: dict[str, Any] = {"max_tokens": 300, **BREAKING}
BREAKS = [
    _chat("break", "say break", **LENGTH),
    _chat("break_stream", "say break", **LENGTH, stream=True, TAIL=2),
    _text("break", "<|break|>", **LENGTH),
    _text("break_stream", "<|break|>", **LENGTH, stream=True, TAIL=2),
    _message("break", "say break", **LENGTH),
    _message("break_stream", "say break", **LENGTH, stream=True, TAIL=1),
    _generate("break", text="<|break|>", sampling_params={"max_new_tokens": 300}, **BREAKING),
    _generate("break_stream", text="<|break|>", sampling_params={"max_new_tokens": 300},
              **BREAKING, stream=True, TAIL=2),
    _infill("break", prompt="<|break|>", n_predict=300, **BREAKING),
    _infill("break_stream", prompt="<|break|>", n_predict=300, **BREAKING, stream=True, TAIL=1),
    _ollama("break", "chat", messages=_user("say break"), options={}, stream=False, **BREAKING),
    _ollama("break_stream", "generate", prompt="say break", options={}, **BREAKING, TAIL=1),
    _response("break", "say break", max_output_tokens=300, **BREAKING),
    _response("break_stream", "say break", max_output_tokens=300, **BREAKING, stream=True, TAIL=2),
    _response("break_background", "say break", max_output_tokens=300, **BREAKING, background=True,
              KEEP={"broken_run": "id"}),
    _get("responses/break_background_ended", "/v1/responses/$broken_run", server="qwen3_coder",
         until=ENDED, vary=CUT),
    _get("responses/break_background_stream", "/v1/responses/$broken_run?stream=true",
         server="qwen3_coder", vary=CUT, tail=2),
    _chat("break_resumable", "say break", **LENGTH, stream=True, resumable=True, TAIL=2,
          HEADERS={"X-Request-Id": "break-1"}),
    _get("streams/break_again", "/v1/streams/break-1?starting_after=3", server="qwen3_coder",
         vary=CUT, tail=2),
]  # fmt: skip

# --- what is rarely sent --------------------------------------------------------------------------

SPACE = {"type": "namespace", "name": "geo", "description": "Places.", "tools": [TOOL, PATCH]}
REGEX = {"type": "grammar", "syntax": "regex", "definition": "[a-d]{4}"}
REGEX_PATCH = {"type": "custom", "name": "patch", "format": REGEX}
LARK = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
LARK_PATCH = {"type": "custom", "name": "patch", "format": LARK}
CALL_ITEM = {"type": "function_call", "call_id": "c1", "name": "time", "arguments": "{}"}
OUTPUT_ITEM = {"type": "function_call_output", "call_id": "c1", "output": "noon"}
RARE = [
    _chat("fence", "say fence", tools=TOOLS, max_tokens=40),
    _chat("fence_stream", "say fence", tools=TOOLS, max_tokens=40, stream=True),
    _chat("bare", "say bare", tools=TOOLS, max_tokens=40, stream=True),
    _chat("broken", "say broken", tools=TOOLS, max_tokens=40),
    _chat("broken_stream", "say broken", tools=TOOLS, max_tokens=40, stream=True),
    _chat("function_turns", [
        *_user("x"),
        {"role": "assistant", "function_call": {"name": "weather", "arguments": "{}"}},
        {"role": "function", "name": "weather", "content": "Sun."}], functions=[FUNCTION]),
    _chat("function_call_none", "say call", functions=[FUNCTION], function_call="none",
          max_tokens=40),
    _chat("tools_allowed_auto", "say both", tools=TOOLS, max_tokens=40,
          tool_choice={"type": "allowed_tools", "allowed_tools": {
              "mode": "auto", "tools": [{"type": "function", "function": {"name": "time"}}]}}),
    _chat("tags", "x", response_format={"type": "structural_tag", "format": {
        "type": "const_string", "value": "fixed"}}),
    _chat("greedy_top_p", top_p=0, temperature=LEFT_OUT, max_tokens=3),
    _chat("seed_minus_one", seed=-1, max_tokens=3),
    _chat("seed_negative", seed=-5, temperature=1, max_tokens=3),
    _chat("nulls", tools=None, stop=None, seed=None, response_format=None, max_tokens=3),
    _chat("error_same_field", max_completion_tokens=4),
    _chat("error_function_call_alone", function_call={"name": "weather"}),
    _chat("error_functions_and_tools", functions=[FUNCTION], tools=TOOLS),
    _chat("error_function_call", functions=[FUNCTION], function_call=5),
    _chat("error_tool_choice_word", tools=TOOLS, tool_choice="often"),
    _chat("error_allowed_mode", tools=TOOLS, tool_choice={
        "type": "allowed_tools", "allowed_tools": {"mode": "often", "tools": []}}),
    _chat("error_allowed_unknown", tools=TOOLS, tool_choice={
        "type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
            {"type": "function", "function": {"name": "f"}}]}}),
    _chat("error_call_arguments", [*_user("x"), {"role": "assistant", "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": "no json"}}]}]),
    _chat("error_format_and_regex", regex="a", response_format={"type": "json_object"}),
    _chat("error_schema_missing", response_format={"type": "json_schema"}),
    _chat("error_parts", [{"role": "user", "content": [{"type": "text"}]}]),
    _text("error_choices", ["a"] * 9, n=128),
    _text("thinking_budget", "<|think|>", thinking_token_budget=2),
    _text("large_body", "the water " * 30_000),
    _generate("error_empty", text=[]),
    _generate("error_mixed", input_ids=[1, [2]]),
    _generate("error_token_ids", text="a", token_ids_logprob=[300]),
    _infill("error_bias", logit_bias=[["x", 1]]),
    _infill("defaults", n_predict=LEFT_OUT, seed=3),
    Call("render/error_long", "POST /render", {"messages": _user("x"), "tool_choice": "required"}),
    Call("tokenize/error_message", "POST /tokenize", {"messages": [{"role": "king"}]}),
    _message("effort", "say think", output_config={"effort": "max"}),
    _message("adaptive", "say think", thinking={"type": "adaptive"}),
    _message("older_format", max_tokens=60, output_format={"type": "json_schema", "schema": POINT}),
    _message("system_turn", [{"role": "system", "content": "Be brief."}, *_user("x")]),
    _message("billing", system=[
        {"type": "text", "text": "x-anthropic-billing-header: a\nBe brief."}]),
    _message("redacted", [*_user("x"), {"role": "assistant", "content": [
        {"type": "redacted_thinking"}, {"type": "text", "text": "Yes."}]}, *_user("y")]),
    _message("merged", [*_user("a"), *_user("b")]),
    _message("metadata", metadata={"user_id": "u"}, max_tokens=2,
             HEADERS={"anthropic-beta": "tools"}),
    _message("error_two_formats", output_format={"type": "json_schema", "schema": POINT},
             output_config={"format": {"type": "json_schema", "schema": POINT}}),
    _message("error_mcp", mcp_servers=[{}]),
    _message("error_compaction", compaction={}),
    _message("error_skills", container={"skills": [1]}),
    _message("error_no_schema", tools=[{"name": "f"}]),
    _message("error_tool_name", tools=[{"name": "no way", "input_schema": {}}]),
    _message("error_choice_name", tools=ANTHROPIC_TOOLS, tool_choice={"type": "tool"}),
    _message("error_no_budget", thinking={"type": "enabled"}),
    _message("error_no_result", [*_user("x"), {"role": "assistant", "content": [
        {"type": "tool_use", "id": "t", "name": "f", "input": {}}]}, *_user("y")]),
    _message("error_half_call", [*_user("x"), {"role": "assistant", "content": [
        {"type": "tool_use", "id": "t"}]}]),
    _message("error_last_empty", [*_user("x"), {"role": "assistant", "content": []}]),
    _message("error_block", [{"role": "user", "content": [{"type": "thinking"}]}]),
    _count("error_tool", tools=[{"name": "f"}]),
    _ollama("chat_broken", "chat", messages=_user("say broken"), tools=TOOLS,
            options={"num_predict": 40}),
    _ollama("chat_json", "chat", messages=_user("x"), format="json", stream=False,
            options={"num_predict": 30, "seed": 4}),
    _ollama("chat_history", "chat", stream=False, messages=[
        *_user("x"),
        {"role": "assistant", "thinking": "Hm.", "content": "Yes.", "tool_calls": [
            {"id": "a", "function": {"name": "time", "arguments": {}}},
            {"id": "b", "function": {"name": "weather", "arguments": {}}}]},
        {"role": "tool", "tool_call_id": "b", "content": "Sun."},
        {"role": "tool", "content": "noon"}]),
    _ollama("generate_truncated", "generate", prompt=LONG, truncate=True, stream=False,
            options={"temperature": 0, "num_predict": 2}),
    _ollama("generate_unlimited", "generate", prompt="say hello", stream=False,
            options={"num_predict": -1, "seed": -1}),
    _ollama("error_raw_system", "generate", prompt="x", raw=True, system="s"),
    _ollama("error_suffix_context", "generate", prompt="x", suffix="y", context=[1]),
    _ollama("error_top_logprobs", "chat", messages=_user("x"), top_logprobs=2),
    _ollama("error_option", "chat", messages=_user("x"), options={"temperature": "warm"}),
    _response("namespace", "say call", tools=[SPACE], max_output_tokens=40),
    _response("namespace_forced", tools=[SPACE], tool_choice="required", max_output_tokens=120,
              parallel_tool_calls=False),
    _response("allowed", "say call", tools=FREE, max_output_tokens=40, tool_choice={
        "type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]}),
    _response("custom_regex", tools=[REGEX_PATCH], max_output_tokens=60,
              tool_choice={"type": "custom", "name": "patch"}),
    _response("custom_lark", "say patch", tools=[LARK_PATCH], max_output_tokens=40, stream=True),
    _response("client_tools", tools=[{"type": "tool_search"}, {"type": "local_shell"}],
              max_output_tokens=2),
    _response("all_items", [
        {"type": "additional_tools", "tools": [TOOL]},
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "x"},
        {"type": "reasoning", "summary": [],
         "content": [{"type": "reasoning_text", "text": "Hm."}]},
        CALL_ITEM, OUTPUT_ITEM,
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "a"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"}],
        tools=FREE),
    _response("error_empty_input", []),
    _response("error_item_field", [{"type": "function_call", "call_id": "c1"}]),
    _response("error_item_type", [{"type": "message", "role": "user", "content": 5}]),
    _response("error_call_twice", [CALL_ITEM, CALL_ITEM, OUTPUT_ITEM]),
    _response("error_output_twice", [CALL_ITEM, OUTPUT_ITEM, OUTPUT_ITEM]),
    _response("error_call_open", [CALL_ITEM, *_user("x")]),
    _response("error_image", [{"role": "user", "content": [{"type": "input_image"}]}]),
    _response("error_encrypted", [{"type": "reasoning", "encrypted_content": "x"}, *_user("x")]),
    _response("error_tool_choice", tools=FREE, tool_choice={"type": "function", "name": "f"}),
    _response("error_tool_field", tools=[{"type": "function"}]),
    _response("error_namespace", tools=[{"type": "namespace", "name": "g", "tools": [{}]}]),
    _response("error_strict", tools=[{**TOOL, "strict": True, "parameters": {
        "type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}}]),
    _response("error_regex", tools=[{**REGEX_PATCH, "format": {**REGEX, "definition": "(("}}],
        tool_choice={"type": "custom", "name": "patch"}),
    Call("conversations/create_for_rare", "POST /v1/conversations",
         {"items": [{"id": "msg_own", "role": "user", "content": "x"}]}, keep={"rare": "id"}),
    Call("conversations/error_id_twice", "POST /v1/conversations/$rare/items",
         {"items": [{"id": "msg_own", "role": "user", "content": "y"}]}),
    Call("conversations/error_no_items", "POST /v1/conversations/$rare/items", {"items": []}),
    Call("conversations/delete_unknown_item", "DELETE /v1/conversations/$rare/items/msg_none"),
    Call("conversations/error_17_pairs", "POST /v1/conversations",
         {"metadata": {str(index): "" for index in range(17)}}),
    Call("conversations/error_long_pair", "POST /v1/conversations", {"metadata": {"a": "b" * 600}}),
    _get("files/error_after", "/v1/files?after=file-none"),
    Call("files/error_no_file", "POST /v1/files",
         f"--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n"
         f"--{BOUNDARY}--\r\n".encode(), FORM),
    Call("files/error_part", "POST /v1/files", _form("x").replace(b'"file"', b'"other"'), FORM),
    Call("files/error_cut", "POST /v1/files", _form("x")[:60], FORM),
    _upload("odd_lines", ODD_LINES, "odd_lines"),
    *_batch("odd_lines", "odd_lines", "/v1/completions", "odd_batch"),
    Call("batches/error_metadata", "POST /v1/batches",
         {"input_file_id": "$texts", "endpoint": "/v1/completions", "completion_window": "24h",
          "metadata": {str(index): "" for index in range(17)}}),
]  # fmt: skip

CALLS: list[Call] = [
    *SERVED, *COMPLETIONS, *CHAT, *TEXTS, *RESPONSES, *CONVERSATIONS, *MESSAGES, *OLLAMA, *STREAMS,
    *FILES, *RARE, *ERRORS, *TENANT_CALLS, *WAITING, *BASE_CALLS, *BREAKS, *STYLE_CALLS, *LATE,
    *PAST,
]  # fmt: skip


def all_calls() -> list[Call]:
    """Return all calls, also those that are sent while others wait."""

    def flat(call: Call) -> list[Call]:
        return [call, *(inner for other in call.during for inner in flat(other))]

    return [inner for call in CALLS for inner in flat(call)]
