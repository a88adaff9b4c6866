"""Texts of different lengths and words: the default prompts of the bench."""

import random
from collections.abc import Sequence

MIN_WORDS, MAX_WORDS = 8, 120
QUESTIONS = (
    "Summarize the following notes",
    "Explain to a beginner",
    "Write a short story about",
    "List the advantages of",
    "Translate into plain English",
    "Answer as a customer agent",
    "Review this proposal",
    "Compare the options",
)
WORDS = (
    "river market engine garden letter winter signal harbor mountain teacher copper morning "
    "paper travel window silver doctor forest number bridge valley music history kitchen "
    "station machine ocean village question summer budget student planet network journey "
    "weather coffee library painting answer battery captain evening factory island "
)


def varied_texts(count: int, seed: int) -> Sequence[str]:
    """Return `count` different texts of 8 to 120 words, the same for the same seed."""
    source = random.Random(f"{seed}/texts")
    known = WORDS.split()
    texts = []
    for index in range(count):
        words = source.choices(known, k=source.randint(MIN_WORDS, MAX_WORDS))
        question = source.choice(QUESTIONS)
        texts.append(f"{words[0].title()} {index}. {question}: {' '.join(words)}.")
    return texts
