"""Write a task for lm-eval that needs no download: `python -m bench.lm_eval_task DIRECTORY`.

The task has 200 questions with four answers each. The command writes `quadriga_quiz.yaml` and the
questions, and prints the directory of the built-in model in safetensors, which lm-eval's own
backends can load. docs/http.md describes how to compare the gateway with them.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.command import command_parser
from bench.models.files import hugging_face_directory

NAME = "quadriga_quiz"
NUM_CHOICES = 4
NUM_PER_KIND = 50

CAPITALS = """
France Paris, Germany Berlin, Italy Rome, Spain Madrid, Portugal Lisbon, Austria Vienna,
Hungary Budapest, Poland Warsaw, Greece Athens, Turkey Ankara, Egypt Cairo, Kenya Nairobi,
Ghana Accra, Nigeria Abuja, Senegal Dakar, Morocco Rabat, Tunisia Tunis, Algeria Algiers,
Ethiopia Addis_Ababa, Uganda Kampala, Russia Moscow, Ukraine Kyiv, Finland Helsinki,
Sweden Stockholm, Norway Oslo, Denmark Copenhagen, Iceland Reykjavik, Ireland Dublin,
Belgium Brussels, Netherlands Amsterdam, Switzerland Bern, Bulgaria Sofia, Romania Bucharest,
Serbia Belgrade, Croatia Zagreb, Japan Tokyo, China Beijing, India New_Delhi, Thailand Bangkok,
Vietnam Hanoi, Indonesia Jakarta, Iran Tehran, Iraq Baghdad, Jordan Amman, Cuba Havana,
Mexico Mexico_City, Canada Ottawa, Peru Lima, Chile Santiago, Argentina Buenos_Aires
"""
OPPOSITES = """
hot cold, big small, fast slow, high low, old young, rich poor, happy sad, strong weak, light dark,
wet dry, hard soft, early late, full empty, open closed, clean dirty, loud quiet, long short,
wide narrow, thick thin, deep shallow, good bad, true false, right wrong, up down, left right,
inside outside, above below, before after, first last, near far, day night, love hate, war peace,
win lose, buy sell, push pull, give take, start stop, laugh cry, remember forget, arrive leave,
accept refuse, rise fall, attack defend, succeed fail, wake sleep, increase decrease,
cheap expensive, simple complex, brave cowardly
"""


class Question(NamedTuple):
    """A question with different choices, of which `answer` is the index of the right one."""

    question: str
    choices: list[str]
    answer: int


def questions(seed: int = 0) -> list[Question]:
    """Return the questions, the same for the same seed."""
    chance = random.Random(seed)
    capitals, opposites = _pairs(CAPITALS), _pairs(OPPOSITES)
    quiz = [
        *_of_pairs("What is the capital of {}?", capitals, chance),
        *_of_pairs("What is the opposite of {}?", opposites, chance),
        *_of_numbers(_sum, chance),
        *_of_numbers(_series, chance),
    ]
    chance.shuffle(quiz)
    return quiz


def _pairs(text: str) -> list[tuple[str, str]]:
    pairs = []
    for pair in text.replace("\n", " ").split(","):
        first, second = pair.split()
        pairs.append((first, second.replace("_", " ")))
    return pairs[:NUM_PER_KIND]


def _of_pairs(
    text: str, pairs: Sequence[tuple[str, str]], chance: random.Random
) -> Iterator[Question]:
    answers = [answer for _, answer in pairs]
    for subject, answer in pairs:
        others = sorted(set(answers) - {answer})
        yield _question(text.format(subject), answer, others, chance)


def _of_numbers(
    ask: Callable[[random.Random], tuple[str, int]], chance: random.Random
) -> Iterator[Question]:
    answers: dict[str, int] = {}
    while len(answers) < NUM_PER_KIND:
        text, answer = ask(chance)
        answers[text] = answer
    for text, answer in answers.items():
        others = [str(answer + offset) for offset in (-10, -3, -2, -1, 1, 2, 3, 10)]
        yield _question(text, str(answer), others, chance)


def _sum(chance: random.Random) -> tuple[str, int]:
    first, second = chance.randint(2, 50), chance.randint(2, 50)
    return f"What is {first} plus {second}?", first + second


def _series(chance: random.Random) -> tuple[str, int]:
    start, step = chance.randint(1, 20), chance.randint(1, 10)
    shown = ", ".join(str(start + step * index) for index in range(4))
    return f"Which number comes next: {shown}?", start + step * 4


def _question(text: str, answer: str, others: Sequence[str], chance: random.Random) -> Question:
    choices = [answer, *chance.sample(others, NUM_CHOICES - 1)]
    chance.shuffle(choices)
    return Question(text, choices, choices.index(answer))


def write(directory: Path, quiz: Sequence[Question]) -> None:
    """Write the two files of the task."""
    directory.mkdir(parents=True, exist_ok=True)
    file = (directory / f"{NAME}.jsonl").resolve()
    file.write_text("".join(json.dumps(question._asdict()) + "\n" for question in quiz))
    task = {
        "task": NAME,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    # A JSON document is a YAML document, too.
    (directory / f"{NAME}.yaml").write_text(json.dumps(task, indent=2) + "\n")


def main() -> None:
    """Write the task into the directory of the command line."""
    parser = command_parser("bench.lm_eval_task", __doc__)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    write(arguments.directory, questions())
    print(f"task {NAME}: --include_path {arguments.directory}")
    print(f"model: {hugging_face_directory('smollm2')}")


if __name__ == "__main__":
    main()
