"""Templates that run away are refused in time, and the process goes on."""

import resource
import signal
import time
from pathlib import Path

import pytest

from quadriga.errors import InvalidRequest
from quadriga.wire.client import ChatMessage, ChatOptions
from tokenizer_proc.preparation import chat as chat_templates
from tokenizer_proc.preparation.chat import RUNS_AWAY as RUNS_AWAY_AT_START
from tokenizer_proc.preparation.chat import ChatTemplate
from tokenizer_proc.preparation.templates.sandbox import TemplateRanAway, run_limited

CHAT = [ChatMessage("user", "Hi")]
# Two equal values, each of which holds 2**60 values; a comparison of them would not end.
NESTED = (
    "{% set ns = namespace(a=[], b=[]) %}{% for i in range(60) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
)
RUNS_AWAY = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "macros that call each other": "{% macro f(n) %}{% for i in range(9) %}{{ f(n - 1) if n }}"
    "{% endfor %}{% endmacro %}{{ f(99) }}",
    "a large string": "{% set x = messages[0].content * 10 ** 10 %}{{ x }}",
    "a string that doubles": "{% set ns = namespace(x='ab') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "a padded string": "{{ messages[0].content | center(10 ** 10) }}",
    "a padded constant": "{{ 'x' | center(10000000000) }}",
    "a format": "{{ '%*d' % (10 ** 9, 1) }}",
    "another format": "{{ '{:>{}}'.format(1, 10 ** 10) }}",
    "a join": "{{ range(99999) | join('x' * 999999) }}",
    "a replacement": "{{ ('a' * 999999).replace('a', 'b' * 999999) }}",
    "an indentation": "{{ messages | tojson(indent=10 ** 10) }}",
    "a list": "{% set x = [1] * 10 ** 10 %}{{ x }}",
    "JSON of nested lists": NESTED + "{{ ns.a | tojson }}",
    "text of nested lists": NESTED + "{{ ns.a }}",
    "a long text": "{% for a in range(99999) %}{{ 'x' * 999 }}{% endfor %}",
    "lorem ipsum": "{{ lipsum(n=10 ** 9) }}",
}
IS_TOO_LARGE = {
    "a power": "{{ 10 ** 10000000000 }}",
    "products": "{% set ns = namespace(x=9) %}{% for i in range(99) %}"
    "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "a rounded number": "{{ 1 | round(10 ** 9, 'floor') }}",
    "nested lists, compared": NESTED + "{{ ns.a == ns.b }}",
    "nested lists, searched": NESTED + "{{ ns.a in [ns.b] }}{{ [ns.b].index(ns.a) }}",
    "nested lists, found": NESTED + "{{ [ns.b].index(ns.a) }}",
    "nested lists, tested": NESTED + "{{ ns.a is equalto(ns.b) }}",
    "nested lists, selected": NESTED + "{{ [ns.a] | select('==', ns.b) | list }}",
    "nested lists, sorted": NESTED + "{{ [ns.a, ns.b] | sort }}",
    "nested tuples as a key": "{% set ns = namespace(a=()) %}{% for i in range(60) %}"
    "{% set ns.a = (ns.a, ns.a) %}{% endfor %}{{ {ns.a: 1} }}",
    "nested tuples, unique": "{% set ns = namespace(a=()) %}{% for i in range(60) %}"
    "{% set ns.a = (ns.a, ns.a) %}{% endfor %}{{ [ns.a] | map('list') | unique | list }}",
}
REACHES_OUT = {
    "a class": "{{ ''.__class__.__mro__[1].__subclasses__()[0] }}",
    "a class by a filter": "{{ ''|attr('__class__')|attr('__mro__')|list }}",
    "a format's attribute": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "a function's globals": "{{ raise_exception.__globals__['json'] }}",
    "a generator's frame": "{{ (messages | map('upper')).gi_frame.f_globals }}",
    "the environment": "{{ self._TemplateReference__context.environment.globals }}",
    "an import": "{{ __import__('os') }}",
    "a file": "{% include '/etc/passwd' %}",
    "messages that change": "{{ messages.clear() }}",
}


@pytest.fixture(autouse=True)
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a template a fifth of the time that it has in a server."""
    monkeypatch.setattr(chat_templates, "MIN_CPU_S", 0.1)


def render(directory: Path, source: str) -> str:
    (directory / "chat.jinja").write_text(source)
    chat = ChatTemplate(directory, directory / "chat.jinja")
    began_at = time.process_time()
    try:
        return chat.render(CHAT, ChatOptions())
    finally:
        assert time.process_time() - began_at < 3
        assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0
        assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


@pytest.mark.parametrize("source", RUNS_AWAY.values(), ids=RUNS_AWAY.keys())
def test_a_template_that_runs_away_is_refused(tmp_path: Path, source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"(ran away: it|refused: ).+") as caught:
        render(tmp_path, source)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize("source", IS_TOO_LARGE.values(), ids=IS_TOO_LARGE.keys())
def test_an_operation_that_no_timer_can_interrupt_is_bounded(tmp_path: Path, source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"refused: .*(more than|unhashable)"):
        render(tmp_path, source)


@pytest.mark.parametrize("source", REACHES_OUT.values(), ids=REACHES_OUT.keys())
def test_a_template_cannot_leave_its_sandbox(tmp_path: Path, source: str) -> None:
    try:
        text = render(tmp_path, source)
    except InvalidRequest:
        return
    assert text.strip() in ("", "[]")


def test_a_start_with_a_template_that_runs_away_takes_one_probe(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(RUNS_AWAY["nested loops"])
    began_at = time.process_time()
    chat = ChatTemplate(tmp_path, tmp_path / "chat.jinja")
    assert chat.notes == (RUNS_AWAY_AT_START,)
    assert time.process_time() - began_at < 2


def test_a_function_that_catches_the_interruption_is_interrupted_again() -> None:
    def catch() -> int:
        num_caught = 0
        while num_caught < 3:
            try:
                while True:
                    pass
            except BaseException:
                num_caught += 1
        return num_caught

    began_at = time.process_time()
    with pytest.raises(TemplateRanAway, match=r"more than 0\.1 s"):
        run_limited(catch, 0.1)
    assert time.process_time() - began_at < 2


def test_work_after_a_limited_run_is_not_interrupted() -> None:
    assert run_limited(lambda: 1, 0.01) == 1
    began_at = time.process_time()
    while time.process_time() - began_at < 0.1:
        pass
