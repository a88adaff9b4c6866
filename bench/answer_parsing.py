"""Measure the parser of answers: `python -m bench.answer_parsing`.

An answer is parsed in pieces of some characters, as tokens arrive, and the time for a piece is
printed: of text, of reasoning, and of the arguments of a call in each style.
"""

import json
import time

from bench.command import command_parser
from http_proc.answer.parser import make_parser
from http_proc.answer.tool_schemas import ToolSchemas
from quadriga.answer_format import AnswerFormat
from quadriga.known_formats import KNOWN_FORMATS

NUM_CHARACTERS = 200_000
NUM_REPETITIONS = 5

PROSE = "The quick brown fox, said 3 < 4 owls, jumps.\nIt was late. "
CODE = 'if a < b:\n    print("x", {1: [2]})\n'
TOOLS = ToolSchemas(run={"type": "object", "properties": {"code": {"type": "string"}}})


def answers() -> dict[str, tuple[AnswerFormat, str]]:
    """Return what is measured: a format and the begin of an answer, repeated to full length."""
    prose = PROSE * (NUM_CHARACTERS // len(PROSE))
    plain = prose.replace("<", "of")
    code = CODE * (NUM_CHARACTERS // len(CODE))
    arguments = json.dumps({"code": code})
    formats = KNOWN_FORMATS
    return {
        "text": (formats["qwen3"], plain),
        "text with <": (formats["qwen3"], prose),
        "reasoning": (formats["qwen3"], f"<think>\n{plain}"),
        "json": (formats["hermes"], f'<tool_call>{{"name": "run", "arguments": {arguments}}}'),
        "named_json": (formats["mistral"], f"[TOOL_CALLS]run[ARGS]{arguments}"),
        "tagged": (formats["qwen3_coder"], f"<function=run><parameter=code>\n{code}"),
        "pythonic": (formats["pythonic"], f"[run(code={code!r})]"),
        "quoted": (formats["gemma4"], f'<|tool_call>call:run{{code:<|"|>{code}'),
        "harmony": (formats["harmony"], f"<|channel|>final<|message|>{plain}"),
    }


def seconds_per_piece(answer_format: AnswerFormat, answer: str, size: int) -> float:
    """Return the shortest time for a piece of `size` characters over some repetitions, in s."""
    pieces = [answer[start : start + size] for start in range(0, len(answer), size)]
    times = []
    for _ in range(NUM_REPETITIONS):
        parser = make_parser(answer_format, tools=TOOLS)
        start = time.process_time()
        for piece in pieces:
            parser.push(piece)
        parser.finish()
        times.append(time.process_time() - start)
    return min(times) / len(pieces)


def main() -> None:
    """Measure all kinds of answers and print a table."""
    parser = command_parser("bench.answer_parsing", __doc__)
    parser.add_argument("--characters", type=int, default=4, help="of a piece")
    size = max(1, parser.parse_args().characters)
    print(f"us for a piece of {size} characters")
    for name, (answer_format, answer) in answers().items():
        print(f"{name:12}{1e6 * seconds_per_piece(answer_format, answer, size):8.2f}")


if __name__ == "__main__":
    main()
