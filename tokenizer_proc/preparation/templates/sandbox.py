"""Jinja's sandbox, with bounds on operations that no timer can interrupt.

Python runs them in one instruction: powers and products of large integers, comparisons and hashes
of lists that hold each other many times. What allocates memory is bounded by `run_limits.py`.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

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
