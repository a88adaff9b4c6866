"""The users' book: its pages, and the examples in them."""

import re
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"

MAX_WORDS = 1500
# References, which are as long as what they list, and the map of the code.
MAX_WORDS_OF = {
    "architecture.md": 2700,
    "coming-from.md": 1650,
    "configuration.md": 4450,
    "http.md": 1800,
    "upgrade.md": 1700,
    "protocol.md": 4350,
    "metrics.md": 1750,
    "troubleshooting.md": 2200,
}

# Pages with examples that run: start, use, operate, scale and reference.
BOOK = (
    "index.md",
    "hardware.md",
    "install-gpu.md",
    "coming-from.md",
    "openai.md",
    "anthropic-ollama.md",
    "tools.md",
    "structured-output.md",
    "editors.md",
    "streams.md",
    "forks.md",
    "responses.md",
    "batches.md",
    "deploy.md",
    "upgrade.md",
    "security.md",
    "embeddings.md",
    "rerank.md",
    "decisions.md",
    "python.md",
    "replay.md",
    "command-line.md",
    "http.md",
    "sampling.md",
    "limits.md",
    "supported.md",
    "model-files.md",
    "configuration.md",
    "protocol.md",
    "keys.md",
    "monitor.md",
    "metrics.md",
    "slow-requests.md",
    "troubleshooting.md",
    "reliability.md",
    "live.md",
    "tune.md",
    "gpus-and-replicas.md",
    "prefill-and-decode.md",
    "clusters.md",
    "speculation.md",
    "kv-cache.md",
)

FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<source>.*?)^ *```$", re.M | re.S)
COMMENT = re.compile(r"<!-- ([^>]*?) -->\s*\Z")


@dataclass(frozen=True)
class Fence:
    """A fenced block of a page.

    Attributes:
        line: number of the line on which it begins.
        comments: texts of the HTML comments right above it.
    """

    line: int
    language: str
    source: str
    comments: tuple[str, ...]

    def comment(self, word: str) -> str | None:
        """Return the rest of the comment that begins with a word, or None."""
        for comment in self.comments:
            if comment.startswith(word):
                return comment.removeprefix(word).strip(" :")
        return None


def fences(page: Path) -> list[Fence]:
    """Return the fenced blocks of a page, in its order."""
    text = page.read_text()
    found = []
    for match in FENCE.finditer(text):
        indent = match["indent"]
        source = "".join(
            line.removeprefix(indent) for line in match["source"].splitlines(keepends=True)
        )
        line = text.count("\n", 0, match.start()) + 1
        above = _comments_above(text[: match.start()])
        found.append(Fence(line, match["language"], source, above))
    return found


def _comments_above(text: str) -> tuple[str, ...]:
    comments: list[str] = []
    while match := COMMENT.search(text):
        comments.insert(0, match[1])
        text = text[: match.start()]
    return tuple(comments)
