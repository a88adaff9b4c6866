"""Measure how many tool calls of the Berkeley leaderboard's questions a server answers rightly.

    pip download --no-deps bfcl-eval && unzip bfcl_eval-*.whl -d bfcl
    python -m bench.tool_calls --data bfcl/bfcl_eval/data -- --model FILE.gguf
    python -m bench.tool_calls --data bfcl/bfcl_eval/data --base-url http://127.0.0.1:8080

Without --base-url a server is started with the flags after `--`. An answer is right by the rules of
the leaderboard's AST checker: as many calls as are asked for, in any order; of each the name, all
required arguments and no unknown ones, their types, and one of the allowed values. The column `in
text` counts the answers whose own text has the right calls as JSON objects, wherever they stand in
it, whether the server has made calls of them or not.
"""

import argparse
import json
import re
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.cli.command import EXIT_OK, command_parser, run_command, run_until_signal
from bench.client.server import free_port, serving
from bench.report.table import FigureRow, add_json_flag, show
from bench.turns import split_common
from quadriga.errors import ConfigError

KINDS = {"simple": "simple_python", "multiple": "multiple", "parallel": "parallel"}
CHOICES = ("auto", "required")
REQUEST_TIMEOUT_S = 600.0
# The types of the questions' functions that JSON schemas call otherwise; "any" has no type.
_SCHEMA_TYPES = {"dict": "object", "float": "number", "tuple": "array"}
# What values of the questions' types are in Python. An argument of any type is a string.
_TYPES: dict[str, type] = {
    "string": str, "integer": int, "float": float, "boolean": bool, "array": list, "tuple": list,
    "dict": dict, "any": str,
}  # fmt: skip
_MAY_BE_MISSING = ""  # among the allowed values of an argument
_IGNORED_CHARACTERS = re.compile(r"[ ,./\-_*^]")

Function = Mapping[str, Any]
AllowedCall = Mapping[str, Mapping[str, list[Any]]]


class Case(NamedTuple):
    """A question, its functions, and the allowed values of the arguments of each expected call."""

    name: str
    messages: list[dict[str, str]]
    functions: list[Function]
    expected: list[AllowedCall]


class WrittenCall(NamedTuple):
    """A call, whose function has the name that the server knows."""

    name: str
    arguments: dict[str, Any]


class GradedAnswer(NamedTuple):
    """An answer. text: what the model wrote, with its marks; its content if no ids are given."""

    calls: list[WrittenCall]
    text: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit code."""
    own, server_flags = split_common(sys.argv[1:] if argv is None else argv)
    parser = command_parser("bench.tool_calls", __doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR",
                        help="bfcl_eval/data of the package bfcl-eval")  # fmt: skip
    parser.add_argument("--base-url", metavar="URL", help="of a server that runs already")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--tool-choices", nargs="+", choices=CHOICES, default=list(CHOICES))
    parser.add_argument("--num-cases", type=int, default=200, metavar="N",
                        help="the first of each kind (default: 200)")  # fmt: skip
    parser.add_argument("--concurrency", type=int, default=4, metavar="N", help="(default: 4)")
    parser.add_argument("--max-tokens", type=int, default=384, metavar="N",
                        help="of an answer (default: 384)")  # fmt: skip
    parser.add_argument("--answers", type=Path, metavar="FILE",
                        help="append every answer to a file, a line of JSON each")  # fmt: skip
    add_json_flag(parser)
    arguments = parser.parse_args(own)
    work = _measure(arguments, server_flags)
    return run_command("bench.tool_calls", lambda: run_until_signal(work))


async def _measure(arguments: argparse.Namespace, server_flags: Sequence[str]) -> int:
    data, num_cases = arguments.data, arguments.num_cases
    cases = {kind: read_cases(data, kind, num_cases) for kind in arguments.kinds}
    async with AsyncExitStack() as stack:
        base_url, name = arguments.base_url, arguments.base_url
        if base_url is None:
            port = free_port()
            _, info = await stack.enter_async_context(serving(server_flags, http_port=port))
            base_url, name = f"http://127.0.0.1:{port}", f"{info['model']} in {info['dtype']}"
        rows = [
            _row(base_url, kind, choice, cases[kind], arguments)
            for kind in arguments.kinds
            for choice in arguments.tool_choices
        ]
    show(f"right tool calls, {name}", rows, arguments.json)
    return EXIT_OK


def read_cases(data: Path, kind: str, num_cases: int) -> list[Case]:
    """Return the first cases of a kind.

    Raises:
        ConfigError: the directory lacks the files.
    """
    name = f"BFCL_v4_{KINDS[kind]}.json"
    try:
        questions, answers = _rows(data / name), _rows(data / "possible_answer" / name)
    except OSError as error:
        raise ConfigError(f"--data is {data}: {error}") from None
    allowed = {answer["id"]: answer["ground_truth"] for answer in answers}
    return [
        Case(each["id"], each["question"][0], each["function"], allowed[each["id"]])
        for each in questions[:num_cases]
    ]


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _row(
    base_url: str, kind: str, choice: str, cases: Sequence[Case], arguments: argparse.Namespace
) -> FigureRow:
    """Ask the questions of a kind, and return the shares of right answers."""
    ask = partial(_answer, base_url, choice, arguments.max_tokens)
    with ThreadPoolExecutor(arguments.concurrency) as pool:
        answers = list(pool.map(ask, cases))
    right = [is_right(case, answer.calls) for case, answer in zip(cases, answers, strict=True)]
    in_text = [
        is_right(case, calls_in_text(answer.text, case.functions))
        for case, answer in zip(cases, answers, strict=True)
    ]
    if arguments.answers is not None:
        with arguments.answers.open("a") as lines:
            for case, answer, *verdicts in zip(cases, answers, right, in_text, strict=True):
                line = {"case": case.name, "choice": choice, "right": verdicts, **answer._asdict()}
                lines.write(json.dumps(line) + "\n")
    return {
        "questions": kind,
        "tool_choice": choice,
        "number": len(cases),
        "with calls": sum(bool(answer.calls) for answer in answers) / len(cases),
        "right": sum(right) / len(cases),
        "in text": sum(in_text) / len(cases) if any(answer.text for answer in answers) else None,
    }


def _answer(base_url: str, choice: str, max_tokens: int, case: Case) -> GradedAnswer:
    """Ask one question."""
    body = {
        "messages": case.messages,
        "tools": [{"type": "function", "function": _schema_of(each)} for each in case.functions],
        "tool_choice": choice,
        "temperature": 0,
        "max_tokens": max_tokens,
        "return_token_ids": True,
    }
    answer = _post(f"{base_url}/v1/chat/completions", body)
    first = answer["choices"][0]
    calls = [_call_of(each["function"]) for each in first["message"].get("tool_calls") or ()]
    text = first["message"].get("content") or ""
    if ids := first.get("token_ids"):
        text = _post(f"{base_url}/detokenize", {"tokens": ids})["prompt"]
    return GradedAnswer(calls, text)


def _post(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def _call_of(function: Mapping[str, str]) -> WrittenCall:
    """Return a call of an answer; broken arguments are none."""
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        arguments = {}
    return WrittenCall(function["name"], arguments if isinstance(arguments, dict) else {})


def _schema_of(function: Function) -> dict[str, Any]:
    """Return a function of a question as APIs take it."""
    return {
        "name": served_name(function["name"]),
        "description": function["description"],
        "parameters": _json_schema(function["parameters"]),
    }


def served_name(name: str) -> str:
    """Return the name of a function without the dots that APIs refuse."""
    return name.replace(".", "_")


def _json_schema(schema: Any) -> Any:
    """Return a schema of a question as a JSON schema."""
    if isinstance(schema, list):
        return [_json_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    converted = {key: _json_schema(value) for key, value in schema.items()}
    kind = schema.get("type")
    if kind == "any":
        del converted["type"]
    elif isinstance(kind, str):
        converted["type"] = _SCHEMA_TYPES.get(kind, kind)
    return converted


def calls_in_text(text: str, functions: Sequence[Function]) -> list[WrittenCall]:
    """Return every JSON object in a text that has the name of a function and arguments."""
    names = {served_name(function["name"]) for function in functions}
    return [
        WrittenCall(value["name"], value["arguments"])
        for value in _objects(text)
        if value.get("name") in names and isinstance(value.get("arguments"), dict)
    ]


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a text, but none within another."""
    decoder, at = json.JSONDecoder(), text.find("{")
    while at >= 0:
        try:
            value, at = decoder.raw_decode(text, at)
            yield value
        except ValueError:
            at += 1
        at = text.find("{", at)


def is_right(case: Case, calls: Sequence[WrittenCall]) -> bool:
    """Return whether the calls are those that the question asks for, in any order."""
    left = list(calls)
    for expected in case.expected:
        (name, allowed), *_ = expected.items()
        function = next(each for each in case.functions if each["name"] == name)
        found = next((call for call in left if _is_allowed(call, function, allowed)), None)
        if found is None:
            return False
        left.remove(found)
    return not left


def _is_allowed(call: WrittenCall, function: Function, allowed: Mapping[str, list[Any]]) -> bool:
    """Return whether a call has the name of a function and arguments with allowed values."""
    properties = function["parameters"]["properties"]
    required = {name for name, values in allowed.items() if _MAY_BE_MISSING not in values}
    given = call.arguments
    return (
        call.name == served_name(function["name"])
        and required.union(function["parameters"]["required"]) <= given.keys() <= allowed.keys()
        and all(_has_value(given[name], properties[name], allowed[name]) for name in given)
    )


def _has_value(value: Any, schema: Mapping[str, Any], allowed: list[Any]) -> bool:
    """Return whether an argument has the type of its schema and one of the allowed values.

    An allowed value of another type stands for the name of a variable, which may be written, too.
    An integer is a float, but not within a list.
    """
    kind = _TYPES[schema["type"]]
    if kind is float and type(value) is int:
        value = float(value)
    if not _has_type(value, kind, allowed):
        return False
    if kind is list and isinstance(value, list):
        item = _TYPES[schema["items"]["type"]]
        lists = [each for each in allowed if isinstance(each, list)]
        if not any(all(_has_type(each, item, items) for each in value) for items in lists):
            return False
    if isinstance(value, dict):
        return any(isinstance(each, dict) and _is_like(value, each) for each in allowed)
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return any(_are_alike(value, each) for each in allowed if isinstance(each, list))
    return _plain(value) in map(_plain, allowed)


def _has_type(value: Any, kind: type, allowed: list[Any]) -> bool:
    """Return whether a value has a type, or that of the first allowed value."""
    first = next((each for each in allowed if each != _MAY_BE_MISSING), None)
    return type(value) is kind or (first is not None and type(value) is type(first))


def _are_alike(values: Sequence[Any], allowed: Sequence[Any]) -> bool:
    """Return whether objects are like as many allowed ones, in their order."""
    return len(values) == len(allowed) and all(
        isinstance(value, dict) and _is_like(value, each)
        for value, each in zip(values, allowed, strict=True)
    )


def _is_like(value: Mapping[str, Any], allowed: Mapping[str, list[Any]]) -> bool:
    """Return whether an object has allowed values, and lacks only what may be missing."""
    needed = {key for key, values in allowed.items() if _MAY_BE_MISSING not in values}
    return needed <= value.keys() <= allowed.keys() and all(
        _plain(value[key]) in map(_plain, allowed[key]) for key in value
    )


def _plain(value: Any) -> Any:
    """Return a value whose texts are without case, spaces and punctuation."""
    if isinstance(value, str):
        return _IGNORED_CHARACTERS.sub("", value).lower().replace("'", '"')
    return [_plain(item) for item in value] if isinstance(value, list) else value


if __name__ == "__main__":
    sys.exit(main())
