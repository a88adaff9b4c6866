"""Parse calls that are written as function calls of Python."""

from http_proc.answer.marks import Steps, UnexpectedText, marks_of
from http_proc.answer.styles.call_context import CallContext
from http_proc.answer.values.copier import ValueCopier
from http_proc.answer.values.syntax import KEYWORD_ARGUMENTS, PYTHON_ARGUMENTS


class PythonicCalls:
    """Parse calls such as f(a=1)."""

    def __init__(self, context: CallContext) -> None:
        self._context = context
        self._name_ends = marks_of("(")

    def call(self, needs_known_name: bool) -> Steps[None]:
        """Parse one call. A call with an argument without a keyword is text."""
        source, writer = self._context.source, self._context.writer
        name, _ = yield from self._context.read_name(self._name_ends)
        source.take(1)
        char = yield from source.skip_space()
        if not (char == ")" or char == "_" or char.isalpha()):
            raise UnexpectedText
        self._context.begin(name, needs_known_name)
        types = self._context.types_of(name)
        copier = ValueCopier(source, PYTHON_ARGUMENTS, writer.arguments, types)
        yield from copier.arguments(KEYWORD_ARGUMENTS)
        writer.end_call()
