"""`quadriga ask`: base models, and the timings of an answer."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from quadriga.client.types import Completion, Timings
from quadriga.errors import InvalidRequest
from quadriga.server.cli import chat
from quadriga.server.cli.main import main
from quadriga.server.cli.shared import speed, timing_line
from quadriga.wire.client import Usage

COMPLETION = Completion(
    "id", "ab", [1, 2], "length", Usage(4, 11, 3),
    Timings(10.0, 10.001, 10.002, 10.012, 10.1, 11.1, 11.2, [10.1, 10.6, 11.1]),
)  # fmt: skip


class BaseModel:
    """A client of a server whose model has no chat template."""

    def __init__(self, chat: bool = False) -> None:
        self.sent: list[Any] = []
        self._chat = chat

    def __enter__(self) -> "BaseModel":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def info(self) -> dict[str, Any]:
        return {"model": "base", "chat": self._chat, "context_length": 9}

    def stream(self, prompt: Any, params: Any) -> Any:
        self.sent.append(prompt)
        if not isinstance(prompt, str):
            raise InvalidRequest("prompt is a chat, which does not work", "prompt")
        yield SimpleNamespace(text="answer", completion=COMPLETION)


def use(monkeypatch: pytest.MonkeyPatch, client: BaseModel) -> BaseModel:
    monkeypatch.setattr(chat, "Client", lambda *a, **k: client)
    return client


def test_a_base_model_continues_the_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = use(monkeypatch, BaseModel())
    assert main(["ask", "Once", "upon"]) == 0
    assert client.sent[-1] == "Once upon"
    out, err = capsys.readouterr()
    assert out == "answer\n" and "no chat template" in err


def test_other_errors_of_a_chat_are_not_hidden(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, BaseModel(chat=True))
    assert main(["ask", "Hi"]) == 1
    assert "prompt is a chat, which does not work" in capsys.readouterr().err


def test_a_chat_with_a_base_model_ends_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, BaseModel())
    assert main(["chat"]) == 1
    assert "quadriga ask continues a text" in capsys.readouterr().err


def test_timings_come_after_the_answer_and_beside_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, BaseModel())
    assert main(["ask", "--plain", "--timings", "Hi"]) == 0
    out, err = capsys.readouterr()
    assert out == "answer\n"
    assert err == timing_line(COMPLETION) + "\n"


def test_timings_name_queue_first_token_speed_and_total() -> None:
    assert timing_line(COMPLETION) == (
        "queue 10 ms · first token 100 ms · 10.0 tok/s · total 1.20 s"
        " · 4 prompt tokens, 3 of them cached · 11 tokens"
    )
    assert speed(COMPLETION) == "11 tokens · 10.0 tok/s"


def test_an_answer_of_one_token_has_no_speed() -> None:
    short = Completion("id", "a", [1], "stop", Usage(4, 1), Timings(10.0, delivered=10.1))
    assert speed(short) == ""
    assert re.fullmatch(r"total 0\.10 s · .*", timing_line(short))
