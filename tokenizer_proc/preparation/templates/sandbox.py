"""Run chat templates: the Jinja environment that they are written for, with limits.

`run_limited` bounds the time and memory of a run, `BoundedSandbox` the operations that no timer can
interrupt, and `compile_template` returns a template in the environment of transformers.
"""

import json
import os
import resource
import signal
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar, cast

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quadriga.errors import ConfigError

# Limits on the time and memory that a template takes, in whichever process it runs.
#
# A template is a program of the model's files. It must not hold up the event loop, on which short
# chats are rendered, nor take the memory of the machine. A timer of the process's CPU time
# interrupts it, and while it runs the address space of the process may grow by MAX_GROWTH_BYTES
# only, so that one large allocation fails and not the process.

T = TypeVar("T")

MAX_GROWTH_BYTES = 256 * 1024 * 1024
# The timer fires again: what the template calls may have caught the first interruption.
_REPEAT_S = 0.05
_PAGE_BYTES = resource.getpagesize()


class TemplateRanAway(Exception):
    """A template took more time, memory or text than it may."""


class _OutOfTime(BaseException):
    """The interruption; no `except Exception` of a template's functions catches it."""


class _Timer:
    """The process's timer. Signals belong to a process, and so there is one."""

    is_armed = False
    is_installed = False
    has_fired = False

    @classmethod
    def arm(cls, seconds: float) -> None:
        if not cls.is_installed:
            signal.signal(signal.SIGVTALRM, cls._interrupt)
            cls.is_installed = True
        cls.is_armed, cls.has_fired = True, False
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _REPEAT_S)

    @classmethod
    def disarm(cls) -> None:
        cls.is_armed = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    @classmethod
    def _interrupt(cls, _number: int, _frame: FrameType | None) -> None:
        if cls.is_armed:
            cls.has_fired = True
            raise _OutOfTime


def run_limited(work: Callable[[], T], max_cpu_s: float) -> T:
    """Return what a template's program returns.

    Args:
        work: runs the program; it is called in the main thread.
        max_cpu_s: CPU time that it may take, in seconds.

    Raises:
        TemplateRanAway: it took more time or memory.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        try:
            _Timer.arm(max_cpu_s)
            resource.setrlimit(resource.RLIMIT_AS, (_address_limit(soft, hard), hard))
            result = work()
            if _Timer.has_fired:
                raise _OutOfTime
            return result
        finally:
            _Timer.disarm()
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    except _OutOfTime:
        _Timer.disarm()
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        raise TemplateRanAway(f"it takes more than {max_cpu_s:.1f} s of CPU time") from None
    except MemoryError:
        megabytes = MAX_GROWTH_BYTES >> 20
        raise TemplateRanAway(f"it takes more than {megabytes} MiB of memory") from None


def join_limited(pieces: Iterable[str], max_chars: int) -> str:
    """Return the pieces of a text, joined. Raise TemplateRanAway if they are too long."""
    num_chars = 0
    parts: list[str] = []
    for piece in pieces:
        num_chars += len(piece)
        if num_chars > max_chars:
            raise TemplateRanAway(f"it writes more than {max_chars} characters")
        parts.append(piece)
    return "".join(parts)


def _address_limit(soft: int, hard: int) -> int:
    """Return the size in bytes to which the address space may grow now."""
    descriptor = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        size = int(os.read(descriptor, 64).partition(b" ")[0]) * _PAGE_BYTES
    finally:
        os.close(descriptor)
    limits = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    return min(size + MAX_GROWTH_BYTES, *limits) if limits else size + MAX_GROWTH_BYTES


# Jinja's sandbox, with bounds on operations that no timer can interrupt.
#
# Python runs them in one instruction: powers and products of large integers, comparisons and
# hashes of lists that hold each other many times. What allocates memory is bounded by
# the limit of the address space above.

MAX_INTEGER_BITS = 16_384
MAX_COMPARED_VALUES = 200_000
MAX_DECIMALS = 300
# Filters and tests that compare or hash the values that they are given.
_COMPARING_FILTERS = ("groupby", "max", "min", "sort", "unique")
_COMPARING_TESTS = ("==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge",
                    "<", "lt", "lessthan", "<=", "le", "in")  # fmt: skip
_COMPARING_METHODS = ("count", "index")
# Jinja's mark of a function whose first argument is the environment.
_PASS_MARK = "jinja_pass_arg"
_PLAIN_TYPES = (str, int, bool, float, type(None))


class BoundedCode(CodeGenerator):
    """The code of a template, in which what is compared or used as a key is checked before."""

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        """Write a comparison. A constant cannot be large, nor be compared for long."""
        operands = [node.expr, *(operation.expr for operation in node.ops)]
        if any(isinstance(operand, nodes.Const) for operand in operands):
            super().visit_Compare(node, frame)
            return
        self.write("(")
        self._write_checked(node.expr, frame)
        for operation in node.ops:
            self.write(f" {operators[operation.op]} ")
            self._write_checked(operation.expr, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        """Write a dictionary, whose keys are hashed."""
        self.write("{")
        for item in node.items:
            self._write_checked(item.key, frame)
            self.write(": ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("}")

    def _write_checked(self, node: nodes.Expr, frame: Frame) -> None:
        self.write("environment.comparable(")
        self.visit(node, frame)
        self.write(")")


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """The sandbox for chat templates."""

    intercepted_binops = frozenset(("*", "**"))
    code_generator_class = BoundedCode

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.filters["sum"] = _sum
        self.filters["round"] = _bounded_round(self.filters["round"])
        for name in _COMPARING_FILTERS:
            self.filters[name] = self._checked(self.filters[name])
        for name in _COMPARING_TESTS:
            self.tests[name] = self._checked(cast(Callable[..., Any], self.tests[name]))

    def comparable(self, value: Any) -> Any:
        """Return a value that may be compared or hashed. Raise OverflowError if it is too large."""
        if type(value) not in _PLAIN_TYPES:
            check_size(value)
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return a product or a power, if it is not too large."""
        if isinstance(left, int) and isinstance(right, int):
            factor = right if operator == "**" else 1
            bits = left.bit_length() * max(factor, 1) + (operator == "*") * right.bit_length()
            if bits > MAX_INTEGER_BITS:
                raise OverflowError(f"an integer has more than {MAX_INTEGER_BITS} bits")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **fields: Any) -> Any:  # noqa: N805
        """Call a function; methods that compare get checked arguments."""
        if getattr(__obj, "__name__", "") in _COMPARING_METHODS:
            for value in (getattr(__obj, "__self__", None), *args):
                check_size(value)
        return super().call(__context, __obj, *args, **fields)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return an item; the key is hashed."""
        if type(argument) is tuple:
            check_size(argument)
        return super().getitem(obj, argument)

    def _checked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter or test that checks the values that it compares."""

        def checked(*args: Any, **fields: Any) -> Any:
            values = [list(value) if isinstance(value, Iterator) else value for value in args]
            for value in values:
                self.comparable(value)
            return function(*values, **fields)

        if hasattr(function, _PASS_MARK):
            setattr(checked, _PASS_MARK, getattr(function, _PASS_MARK))
        return checked


def check_size(value: Any, max_values: int = MAX_COMPARED_VALUES) -> None:
    """Raise OverflowError if a value holds more than `max_values` values.

    A value that is held several times counts several times: it is compared as often.
    """
    num_values = 0
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending += item.values()
            num_values += len(item)
        elif isinstance(item, list | tuple):
            pending += item
            num_values += len(item)
        if num_values > max_values:
            raise OverflowError(f"a value holds more than {max_values} values")


@jinja2.pass_environment
def _sum(
    environment: jinja2.Environment, iterable: Iterable[Any], attribute: Any = None, start: Any = 0
) -> Any:
    """Return a sum as Jinja's filter does, in steps that a timer can interrupt."""
    getter = make_attrgetter(environment, attribute) if attribute else None
    for item in iterable:
        start = start + (item if getter is None else getter(item))
    return start


def _bounded_round(function: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(value: float, precision: int = 0, method: Any = "common") -> Any:
        if abs(precision) > MAX_DECIMALS:
            raise OverflowError(f"a number is rounded to more than {MAX_DECIMALS} digits")
        return function(value, precision, method)

    return bounded


# The Jinja environment that chat templates are written for.
#
# Source: transformers.utils.chat_template_utils.

MAX_COMPILE_S = 5.0
# This is more than the messages and tools of a request can hold.
MAX_JSON_VALUES = 4_000_000


def compile_template(source: str, origin: Path) -> jinja2.Template:
    """Return a template in the sandbox. Raise ConfigError if it is no Jinja template."""
    try:
        return run_limited(lambda: _environment().from_string(source), MAX_COMPILE_S)
    except (jinja2.TemplateError, SyntaxError, RecursionError, TemplateRanAway) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"the chat template cannot be read: {reason}; correct it in {origin}, or remove it to"
            " serve plain prompts only"
        ) from None


def _environment() -> jinja2.Environment:
    """Return the environment, with what Hugging Face's has beyond Jinja's own."""
    environment = BoundedSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["dict"] = _DictFunctions()
    environment.globals["namespace"] = _Namespace
    return environment


class _DictFunctions:
    """Python's `dict` for templates, without the attributes of the type."""

    def __call__(self, *args: Any, **fields: Any) -> dict[Any, Any]:
        return dict(*args, **fields)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, without the attributes that lead to Python's own."""

    def __init__(*args: Any, **fields: Any) -> None:
        self, *others = args  # so that a template may call an attribute "self"
        attributes = dict(*others, **fields)
        for name in attributes:
            _check_attribute(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a namespace has no attribute {name!r}: choose a name without an underscore before it"
        )


class GenerationBlock(Extension):
    """{% generation %}...{% endgeneration %}, which marks the assistant's text for training.

    The text inside is rendered as if the tags were not there.
    """

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        """Return the statements inside, which are a scope of their own, as in transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [jinja2.nodes.Scope(body, lineno=line)]


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without HTML escapes, in place of Jinja's own filter."""
    check_size(value, MAX_JSON_VALUES)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
