"""Loads in which more or less of an answer repeats text that was there before."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from quadriga.client import SamplingParams

NAMES = ("area", "volume", "weight", "price", "length", "height", "speed", "score", "rate", "total")
CITIES = ("Oslo", "Rome", "Lima", "Cairo", "Delhi", "Quito", "Paris", "Tunis", "Dakar", "Seoul")
TOPICS = ("volcanoes", "bread", "the moon", "trains", "honey bees", "chess", "rivers", "glass")
SUBJECTS = (
    "The city",
    "A new bridge",
    "The old library",
    "Its harbour",
    "The market",
    "A festival",
)
VERBS = ("attracts", "employs", "connects", "feeds", "surprises", "protects", "outlives", "needs")
OBJECTS = ("many visitors", "the northern valley", "two hundred people", "the whole region")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "orders": {
            "type": "array",
            "minItems": 4,
            "maxItems": 4,
            "items": {
                "type": "object",
                "properties": {
                    "customer_name": {"type": "string", "maxLength": 20},
                    "city": {"type": "string", "maxLength": 12},
                    "quantity": {"type": "integer", "minimum": 0, "maximum": 999},
                    "is_delivered": {"type": "boolean"},
                },
                "required": ["customer_name", "city", "quantity", "is_delivered"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["orders"],
    "additionalProperties": False,
}


class GuessTask(NamedTuple):
    """A question, and how it is answered."""

    question: str
    params: SamplingParams


def edit(draw: random.Random, max_tokens: int) -> GuessTask:
    """Return code whose answer repeats most of it."""
    names = draw.sample(NAMES, 4)
    code = "\n".join(
        f"def {name}_of(item):\n    if item.{name} is None:\n        raise ValueError('item has no"
        f" {name}')\n    return item.{name} * {draw.randrange(2, 99)}\n"
        for name in names
    )
    question = f"Repeat this code, but rename item to thing. Write only code.\n\n{code}"
    return GuessTask(question, SamplingParams(temperature=0, max_tokens=max_tokens))


def extraction(draw: random.Random, max_tokens: int) -> GuessTask:
    """Return a text with facts that are wanted as JSON of a schema."""
    orders = ". ".join(
        f"Customer {draw.choice(NAMES).title()} {draw.choice(NAMES).title()} from"
        f" {draw.choice(CITIES)} ordered {draw.randrange(100)} pieces"
        for _ in range(4)
    )
    params = SamplingParams(temperature=0, max_tokens=max_tokens, json_schema=SCHEMA)
    return GuessTask(f"List the orders as JSON: {orders}.", params)


def summary(draw: random.Random, max_tokens: int) -> GuessTask:
    """Return a text to be summarized."""
    text = " ".join(
        f"{draw.choice(SUBJECTS)} {draw.choice(VERBS)} {draw.choice(OBJECTS)}." for _ in range(25)
    )
    question = f"Summarize this text about {draw.choice(CITIES)}:\n\n{text}"
    return GuessTask(question, SamplingParams(temperature=0, max_tokens=max_tokens))


def chat(draw: random.Random, max_tokens: int) -> GuessTask:
    """Return a short question, answered in the model's own words."""
    question = f"Tell me something about {draw.choice(TOPICS)} and {draw.choice(CITIES)}."
    params = SamplingParams(temperature=0.8, seed=draw.randrange(2**31), max_tokens=max_tokens)
    return GuessTask(question, params)


def noise(draw: random.Random, max_tokens: int) -> GuessTask:
    """Return a question without sense, whose answer is drawn from nearly all tokens."""
    question = " ".join(f"{draw.choice(NAMES)}{draw.randrange(1000)}" for _ in range(40))
    params = SamplingParams(
        temperature=3.0, seed=draw.randrange(2**31), max_tokens=max_tokens, ignore_eos=True
    )
    return GuessTask(question, params)


LOADS: dict[str, Callable[[random.Random, int], GuessTask]] = {
    "edit": edit,
    "extraction": extraction,
    "summary": summary,
    "chat": chat,
    "random": noise,
}


def tasks_of(load: str, count: int, seed: int, max_tokens: int) -> list[GuessTask]:
    """Return tasks that differ from those of another seed or number."""
    draw = random.Random(f"{load}/{count}/{seed}")
    return [LOADS[load](draw, max_tokens) for _ in range(count)]
