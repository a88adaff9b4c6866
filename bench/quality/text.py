"""A text that is on every machine: the prose of Python's reference manual."""

from pydoc_data.topics import topics

MIN_PARAGRAPH_CHARACTERS = 200  # shorter ones are headings and signatures
MAX_TEXT_CHARACTERS = 40_000


def manual_prose() -> str:
    """Return the manual's longer paragraphs of plain prose, up to a length.

    Another version of Python has another text.
    """
    paragraphs = {
        " ".join(block.split()): None
        for name in sorted(topics)
        for block in topics[name].split("\n\n")
        if _is_prose(block)
    }
    text = "\n\n".join(paragraphs)
    return text[: text.find("\n\n", MAX_TEXT_CHARACTERS)]


def _is_prose(block: str) -> bool:
    """Return whether a paragraph is neither code or grammar (indented) nor cut off."""
    lines = block.splitlines()
    flush = all(not line.startswith((" ", "*", "+", "|")) for line in lines)
    return flush and len(block) >= MIN_PARAGRAPH_CHARACTERS and block.endswith(".")
