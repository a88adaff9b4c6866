"""The values of --tool-call-parser and --reasoning-parser."""

from quadriga.errors import ConfigError
from quadriga.keywords import nearest

AUTO = "auto"
NONE = "none"


def check_parsers(tool_call_parser: str, reasoning_parser: str) -> None:
    """Raise ConfigError for a value that is neither auto, none, nor the name of a known format."""
    if {tool_call_parser, reasoning_parser} <= {AUTO, NONE}:
        return
    from quadriga.known_formats import KNOWN_FORMATS

    formats = KNOWN_FORMATS.values()
    _check("tool_call_parser", tool_call_parser, [f.source for f in formats if f.calls])
    _check("reasoning_parser", reasoning_parser, [f.source for f in formats if f.reasoning])


def _check(name: str, value: str, known: list[str]) -> None:
    names = [AUTO, NONE, *sorted(known)]
    if value not in names:
        raise ConfigError(
            f"{name} is {value!r}: it must be one of {', '.join(names)}{nearest(value, names)}"
        )
