"""Pages of the users' book are short, and each shows an example."""

import pytest

from tests.users_book import BOOK, DOCS, MAX_WORDS, MAX_WORDS_OF, fences


@pytest.mark.parametrize("name", sorted(page.name for page in DOCS.glob("*.md")))
def test_a_page_is_short(name: str) -> None:
    num_words = len((DOCS / name).read_text().split())
    assert num_words <= MAX_WORDS_OF.get(name, MAX_WORDS), f"{name} has {num_words} words"


@pytest.mark.parametrize("name", BOOK)
def test_a_page_has_an_example_that_runs(name: str) -> None:
    examples = [block for block in fences(DOCS / name) if block.language in ("python", "bash")]
    assert any(block.comment("not run") is None for block in examples)


@pytest.mark.parametrize("name", BOOK)
def test_a_fence_that_looks_like_a_shell_is_one(name: str) -> None:
    """An example without a language would not run."""
    commands = ("curl ", "quadriga ", "pip ", "$ ", "from quadriga")
    plain = [block for block in fences(DOCS / name) if not block.language]
    assert not [block.line for block in plain if block.source.startswith(commands)]


# What people type into the site's search, and a page that answers it.
SEARCHES = {
    "rate limit": "keys.md",
    "24 GB": "hardware.md",
    "two GPUs": "gpus-and-replicas.md",
    "embeddings": "embeddings.md",
    "AWQ": "supported.md",
    "upgrade": "upgrade.md",
    "back up": "upgrade.md",
    "logrotate": "upgrade.md",
    "why was my request slow": "slow-requests.md",
    "Kubernetes": "clusters.md",
    "Prometheus": "monitor.md",
    "Grafana": "monitor.md",
    "Claude Code": "anthropic-ollama.md",
    "chat template": "openai.md",
}


@pytest.mark.parametrize(("words", "name"), SEARCHES.items())
def test_the_words_of_a_search_are_on_the_page_that_answers_it(words: str, name: str) -> None:
    assert words.lower() in (DOCS / name).read_text().lower()
