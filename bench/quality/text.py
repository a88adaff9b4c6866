"""A text to measure models on that is on every machine: prose of Python's own reference manual."""

from pydoc_data.topics import topics

MIN_CHARACTERS = 200
"""Of a paragraph: shorter ones are headings, signatures and the like."""
MAX_CHARACTERS = 40_000


def manual_prose() -> str:
    """The manual's longer paragraphs of plain prose, until there are enough. Another version of
    Python has another text."""
    paragraphs = {
        " ".join(block.split()): None
        for name in sorted(topics)
        for block in topics[name].split("\n\n")
        if _is_prose(block)
    }
    text = "\n\n".join(paragraphs)
    return text[: text.find("\n\n", MAX_CHARACTERS)]


def _is_prose(block: str) -> bool:
    """Neither indented, as code and grammar are, nor cut off in the middle."""
    lines = block.splitlines()
    flush = all(not line.startswith((" ", "*", "+", "|")) for line in lines)
    return flush and len(block) >= MIN_CHARACTERS and block.endswith(".")
