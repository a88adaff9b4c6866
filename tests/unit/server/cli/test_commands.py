"""The commands at a terminal, with a client that answers by itself."""

import builtins
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import quadriga
from quadriga.errors import PromptTooLong, RequestFailed, ServerFailed
from quadriga.sampling.params import SamplingParams
from quadriga.server.cli import chat
from quadriga.server.cli.main import main
from tests.unit.fake_server import FakeServer, running_fake_server
from tests.waiting import wait_until


class FakeClient:
    """Answers a question with its number; some words in their own ways."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def stream(self, prompt: Any, params: Any, **options: Any) -> Iterator[Any]:
        self.sent.append(prompt)
        question = prompt[-1]["content"]
        if question == "long":
            raise PromptTooLong("prompt has 9 tokens")
        if question == "once" and len(self.sent) > 1:
            raise RequestFailed("broke")
        if question == "stop at once":
            raise KeyboardInterrupt
        yield SimpleNamespace(text="answer ", completion=None)
        if question == "stop":
            raise KeyboardInterrupt
        if question == "fail":
            raise RequestFailed("broke")
        if question == "die":
            raise ServerFailed("gone")
        yield SimpleNamespace(text=str(len(self.sent)), completion=None)


def talk(monkeypatch: pytest.MonkeyPatch, *lines: Any, system: str = "") -> list[Any]:
    """What was sent for these lines; an exception stands for what a key raises."""
    waiting = [*lines, EOFError()]

    def read(prompt: str) -> str:
        line = waiting.pop(0)
        if isinstance(line, BaseException):
            raise line
        return str(line)

    monkeypatch.setattr(builtins, "input", read)
    client: Any = FakeClient()
    chat.Chat(client, SamplingParams(), system).talk()
    return [[turn["content"] for turn in prompt] for prompt in client.sent]


def test_each_question_takes_the_chat_along(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, "one", "", "two", system="be brief") == [
        ["be brief", "one"],
        ["be brief", "one", "answer 1", "two"],
    ]
    assert capsys.readouterr().out == "answer 1\nanswer 2\n"


def test_clear_begins_anew_and_exit_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = talk(monkeypatch, "one", "/clear", "two", "/exit", "three", system="be brief")
    assert sent == [["be brief", "one"], ["be brief", "two"]]


def test_an_unknown_command_is_no_question(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, "/foo bar") == []
    assert "no such command: /foo. /help lists the commands" in capsys.readouterr().err


def test_help_lists_every_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, "/help", "/quit", "never") == []
    shown = capsys.readouterr().err
    assert all(
        name in shown for name in ("/system TEXT", "/regen", "/save FILE", "/reset", "/quit")
    )


def test_the_system_prompt_can_change_and_stays_after_a_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = talk(monkeypatch, "/system be brief", "one", "/reset", "two", "/system", "three")
    assert sent == [["be brief", "one"], ["be brief", "two"], ["two", "answer 2", "three"]]


def test_regen_asks_the_last_question_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = talk(monkeypatch, "/regen", "one", "two", "/regen", "three")
    assert sent[2] == ["one", "answer 1", "two"]
    assert sent[3] == ["one", "answer 1", "two", "answer 3", "three"]


def test_an_answer_stays_if_it_cannot_be_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = talk(monkeypatch, "once", "/regen", "two")
    assert sent[-1] == ["once", "answer 1", "two"]


def test_a_backslash_continues_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert talk(monkeypatch, "one\\", "two\\", "three") == [["one\ntwo\nthree"]]


def test_a_chat_is_saved_as_messages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "chat.json"
    talk(monkeypatch, "grüße", f"/save {file}", "/save", f"/save {tmp_path}", system="be brief")
    assert json.loads(file.read_text(encoding="utf-8")) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "grüße"},
        {"role": "assistant", "content": "answer 1"},
    ]
    shown = capsys.readouterr().err
    assert "/save needs a file" in shown
    assert f"{tmp_path} cannot be written: Is a directory" in shown


def test_ctrl_c_stops_the_answer_and_not_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = talk(monkeypatch, KeyboardInterrupt(), "stop at once", "stop", "two")
    assert sent == [["stop at once"], ["stop"], ["stop", "answer ", "two"]]


@pytest.mark.parametrize("question", ["long", "fail"])
def test_a_question_that_fails_leaves_the_chat_as_it_was(
    monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    assert talk(monkeypatch, "one", question, "two")[-1] == ["one", "answer 1", "two"]


def test_a_server_that_is_gone_ends_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServerFailed):
        talk(monkeypatch, "die", "two")


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--help"], ["chat", "ask", "serve", "bench"]),
        ([], ["chat", "ask", "serve", "bench"]),
        (["chat", "--help"], ["the server:", "the answer:", "--system"]),
        (["ask", "--help"], ["--plain", "--temperature"]),
        (["bench", "--help"], ["requests:", "schedule:", "output:"]),
        (
            ["serve", "--help"],
            ["quadriga serve [MODEL ...] [FLAGS]", "--config", "Scheduling (scheduler_proc):"],
        ),
    ],
)
def test_help_is_in_groups(
    arguments: list[str], shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    text = capsys.readouterr().out
    assert stop.value.code == 0
    assert all(word in text for word in shown), text


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("serv", "there is no command serv; did you mean serve?"),
        (
            "xyz",
            "there is no command xyz; the commands are serve, bench, replay, chat, ask, embed,"
            " batch, trace, models, top, keygen, keys",
        ),
    ],
)
def test_a_command_that_does_not_exist_is_an_error_with_a_remedy(
    word: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([word])
    assert stop.value.code == 2
    assert remedy in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ("ask --max-tokens 5 Hi", "quadriga ask: error: there is no flag --max-tokens; near it:"
         " --max-new-tokens"),
        ("chat --temp 1", "near it: --temperature"),
        ("batch in -o out --endpoint http://x", "near it: --url"),
        ("top --url http://x", "near it: --endpoint"),
        ("trace ID --api_key k", "near it: --api-key"),
        ("models check m --contxt-length=5", "no flag --contxt-length; near it: --context-length"),
        ("keys add --tokens-minute 5 a --keys f", "near it: --tokens-per-minute"),
        ("keygen d --xyz", "there is no flag --xyz; --help shows the flags"),
        ("chat hello", "unknown: hello"),
    ],
)  # fmt: skip
def test_a_flag_that_does_not_exist_is_an_error_that_names_those_near_it(
    arguments: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments.split())
    assert stop.value.code == 2
    assert remedy in capsys.readouterr().err


def test_the_bench_names_flags_near_an_unknown_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--request-rat", "5"]) == 2
    assert "there is no flag --request-rat; near it: --request-rate" in capsys.readouterr().err


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"quadriga {quadriga.__version__}\n"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running_fake_server() as server:
        yield server


@pytest.mark.parametrize(("end", "code"), [("ctrl-c", 130), ("closed pipe", 141)])
def test_an_answer_that_is_left_is_aborted_without_a_word(
    server: FakeServer, end: str, code: int
) -> None:
    command = [sys.executable, "-m", "quadriga", "ask", "--endpoint", server.endpoint, "endless"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.read(20) == b"ab" * 10
            if end == "ctrl-c":
                process.send_signal(signal.SIGINT)
                process.stdout.read()
            else:
                process.stdout.close()
            assert process.wait(timeout=20) == code
            assert process.stderr.read() == b""
        finally:
            process.kill()
    wait_until(lambda: server.aborts, 10)


def test_an_answer_that_cannot_be_written_is_an_error_in_one_line(server: FakeServer) -> None:
    command = [sys.executable, "-m", "quadriga", "ask", "--endpoint", server.endpoint, "endless"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=30)
    assert ended.returncode == 1
    assert ended.stderr == b"OSError: [Errno 28] No space left on device\n"


def test_a_key_stops_an_answer_of_a_server_that_is_slow(server: FakeServer) -> None:
    command = [sys.executable, "-m", "quadriga", "chat", "--endpoint", server.endpoint]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*command, "--max-new-tokens", "9"], text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            process.stdin.write("silent\n")
            process.stdin.flush()
            wait_until(lambda: server.requests or process.poll() is not None, 20)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate("/clear\nHello\n", timeout=20)
        finally:
            process.kill()
    assert process.returncode == 0
    assert err.splitlines()[1] == "stopped" and out == "\nab\n"
    assert server.aborts == 1


def test_an_endpoint_without_server_is_an_error_of_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command in (["ask", "Hi"], ["chat"]):
        assert main([*command, "--endpoint", "nowhere"]) == 1
        assert capsys.readouterr().err.count("\n") == 1
