"""The log of a process in JSON, in a process of its own, and as text."""

import json
import os
import re
import subprocess
import sys
from typing import Any

SET_UP = "from quadriga.server.processes.logs import *\nimport logging, threading, warnings\n"


def logged(code: str, log_format: str = "json", **environment: str) -> str:
    """Return the standard error of a process that sets up its log and runs the code."""
    start = f"{SET_UP}set_up_logging('worker_proc', 'info', {log_format!r})\n"
    command = [sys.executable, "-c", start + code]
    return subprocess.run(
        command, stderr=subprocess.PIPE, text=True, timeout=30, check=False,
        env=os.environ | {"PYTHONUTF8": "0", "PYTHONIOENCODING": "utf-8"} | environment,
        encoding="utf-8",
    ).stderr  # fmt: skip


def objects(code: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in logged(code).splitlines()]


def test_a_line_is_an_object_with_fields_of_its_own() -> None:
    (line,) = objects(
        "log_fields(logging.WARNING, 'slow: 1 · \\n%s', event='request', seconds=1.5)"
    )
    time = line.pop("time")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", time)
    assert line == {
        "level": "warning",
        "process": "worker_proc",
        "message": "slow: 1 · \n%s",
        "event": "request",
        "seconds": 1.5,
    }


def test_text_that_can_be_shown_is_not_escaped_and_other_characters_are() -> None:
    code = "logging.info('slow · größer 日本 😀 \\x1b[2J\\u202e\\u2028\\x85\\U000e0001')"
    text = logged(code)
    assert "slow · größer 日本 😀 " in text
    assert text.count("\n") == 1 and text.strip().isprintable()
    assert json.loads(text)["message"] == "slow · größer 日本 😀 \x1b[2J\u202e\u2028\x85\U000e0001"


def test_an_output_that_has_no_such_characters_gets_their_numbers() -> None:
    text = logged("logging.info('slow · größer')", PYTHONIOENCODING="ascii")
    assert text.isascii() and json.loads(text)["message"] == "slow · größer"


def test_severities_below_the_level_are_left_out() -> None:
    code = "logging.debug('no'); log_fields(logging.DEBUG, 'no'); logging.info('yes')"
    assert [line["message"] for line in objects(code)] == ["yes"]


def test_a_traceback_is_one_field() -> None:
    handled = "try:\n    1 / 0\nexcept ZeroDivisionError:\n    log_exception()\n"
    thread = "t = threading.Thread(target=lambda: 1 / 0, name='helper'); t.start(); t.join()\n"
    lines = objects(handled + thread + "1 / 0")
    assert [line["message"] for line in lines] == [
        "uncaught exception",
        "uncaught exception in thread helper",
        "uncaught exception",
    ]
    for line in lines:
        assert line["traceback"].startswith("Traceback (most recent call last):\n")
        assert line["traceback"].endswith("ZeroDivisionError: division by zero")


def test_warnings_and_any_value_are_lines_of_json() -> None:
    lines = objects(
        "import pathlib\nwarnings.warn('old', stacklevel=1)\n"
        "log_fields(20, 'x\\ud800', path=pathlib.Path('/a'))"
    )
    assert "old" in lines[0]["message"] and lines[0]["level"] == "warning"
    assert lines[1]["path"] == "/a"


def test_text_has_time_process_and_severity_and_no_fields() -> None:
    text = logged("log_fields(logging.INFO, 'stopped %', seconds=1)", "text")
    assert re.fullmatch(r"\d\d:\d\d:\d\d worker_proc INFO stopped %\n", text)
    failed = logged("try:\n    1 / 0\nexcept ZeroDivisionError:\n    log_exception()\n", "text")
    assert failed.startswith("Traceback") and failed.endswith("division by zero\n")


def test_the_launcher_logs_json_as_the_other_processes_do() -> None:
    code = (
        "from quadriga.server.processes.logs import say\n"
        "say('  docs    http://127.0.0.1:1/docs')\n"
        "say('error: it broke', event='failed', code='config_error')\n"
    )
    docs, error = objects(code)
    assert (docs["level"], docs["message"]) == ("info", "docs    http://127.0.0.1:1/docs")
    assert (error["level"], error["message"], error["code"]) == (
        "error",
        "it broke",
        "config_error",
    )
