"""Stop strings: the way a text is cut into pieces never changes the result."""

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from detok_proc.stops import (
    REQUEST_BUDGET_S,
    ChoiceBudget,
    RegexMatcher,
    RequestBudget,
    SearchTooSlow,
    StopStrings,
)
from quadriga.errors import InvalidRequest
from quadriga.server.grammars.stop_regex import MAX_MATCH_CHARS, compile_stop_regex

LETTERS = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4)


def search(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Search as specified: the match that ends first, of these the longest, cuts the text."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


def feed(pieces: list[str], stops: list[str]) -> tuple[str, str | None, list[str]]:
    """Return (everything that was sent, the match, what was sent after each piece)."""
    search_in_pieces, sent = StopStrings(stops), ""
    trail: list[str] = []
    for piece in pieces:
        text, matched = search_in_pieces.push(piece)
        sent += text
        trail.append(sent)
        if matched is not None:
            return sent, matched, trail
    return sent + search_in_pieces.flush(), None, trail


def cut(text: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


@settings(max_examples=300)
@given(LETTERS, STOPS, st.lists(st.integers(0, 30), max_size=8))
def test_any_cutting_gives_what_a_search_of_the_whole_gives(
    text: str, stops: list[str], places: list[int]
) -> None:
    sent, matched, _ = feed(cut(text, places), stops)
    assert (sent, matched) == search(text, stops)


@settings(max_examples=200)
@given(LETTERS, STOPS)
def test_no_more_is_held_back_than_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    _, _, trail = feed(list(text), stops)
    for count, sent in enumerate(trail, 1):
        if search(text[:count], stops)[1] is None:
            beginnings = [stop[:n] for stop in stops for n in range(1, len(stop))]
            possible = max((len(b) for b in beginnings if text[:count].endswith(b)), default=0)
            assert len(sent) == count - possible


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["Hello wor", "ld!"], ["world"], ("Hello ", "world")),
        (["a\n", "\nb"], ["\n\n"], ("a", "\n\n")),
        (["abcd"], ["abcd", "bc"], ("a", "bc")),
        (["xyz"], ["z", "yz", "xyz"], ("", "xyz")),
        (["aa", "ab"], ["aab"], ("a", "aab")),
        (["日本", "語"], ["本語"], ("日", "本語")),
        (["almost sto"], ["stop"], ("almost sto", None)),
        (["text"], [], ("text", None)),
    ],
)
def test_examples(pieces: list[str], stops: list[str], expected: tuple[str, str | None]) -> None:
    assert feed(pieces, stops)[:2] == expected


def test_a_hostile_text_takes_linear_time() -> None:
    search_in_pieces = StopStrings(["a" * 255 + str(n % 10) for n in range(16)])
    began_at = time.thread_time()
    for _ in range(2000):
        search_in_pieces.push("aaaa")
    assert time.thread_time() - began_at < 5


# --- regular expressions --------------------------------------------------------------------------

PATTERNS = ["ab+", "a[bc]a|cc", "(?:ab|b)c", "c(?!a)b", "(?<=b)ca", "a.a", "b{2,3}"]


def search_regexes(text: str, patterns: Sequence[str]) -> tuple[str, str | None]:
    """Search as specified: the first end of a match cuts the text, at the longest match's begin."""
    for end in range(1, len(text) + 1):
        found = [(regex.search(p, text[:end]), p) for p in patterns]
        matches = [(m.end() - m.start(), p) for m, p in found if m and m.end() > m.start()]
        if matches:
            length, pattern = max(matches, key=lambda match: match[0])
            return text[: end - length], pattern
    return text, None


@settings(max_examples=200)
@given(
    LETTERS,
    st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=2, unique=True),
    st.lists(st.integers(0, 30), max_size=6),
)
def test_an_expression_ends_the_text_at_its_first_match_however_it_is_cut(
    text: str, patterns: list[str], places: list[int]
) -> None:
    search_in_pieces, sent, matched = StopStrings([], patterns), "", None
    for piece in cut(text, places):
        piece_sent, matched = search_in_pieces.push(piece)
        sent += piece_sent
        if matched is not None:
            break
    sent += "" if matched else search_in_pieces.flush()
    expected, pattern = search_regexes(text, patterns)
    assert (sent, matched is None) == (expected, pattern is None)


def test_only_what_a_match_has_begun_with_is_held_back() -> None:
    stops = StopStrings(["END"], [r"\n\nQ\d+:"])
    sent = [stops.push(piece).text for piece in ("a\n", "\nQ", "1", "x E", "y\n\nQ12")]
    assert sent == ["a", "", "", "\n\nQ1x ", "Ey"]
    assert stops.push(":z") == ("", r"\n\nQ\d+:")


def test_the_stop_string_is_kept_in_the_text_on_request() -> None:
    assert StopStrings(["b"], ["c+"], keeps_stop=True).push("abc") == ("ab", "b")
    assert StopStrings(["x"], ["b+c"], keeps_stop=True).push("abbcd") == ("abbc", "b+c")


def test_an_expression_that_takes_too_long_says_so() -> None:
    stops = StopStrings([], ["(a+)+$b", "(?:fooaaaaaaaaaaaa){e<=9}q"])
    with pytest.raises(SearchTooSlow, match="takes too long; simplify it"):
        stops.push("a" * 300)


def make_matcher(pattern: str) -> RegexMatcher:
    return RegexMatcher(pattern, ChoiceBudget(RequestBudget()))


def test_the_choices_of_a_request_share_its_budget_and_ordinary_ones_go_on() -> None:
    budget = RequestBudget()
    hostile = [StopStrings([], ["(a+)+$b", "(a|a)*$c"], budget=budget) for _ in range(64)]
    began_at = time.thread_time()
    for stops in hostile:
        with pytest.raises(SearchTooSlow):
            stops.push("a" * 300)
    assert time.thread_time() - began_at < 0.5
    assert StopStrings([], ["b+c"], budget=budget).push("abbcd") == ("a", "b+c")


def test_fast_searches_save_little_for_a_slow_one() -> None:
    budget = ChoiceBudget(RequestBudget())
    fast, slow = regex.compile("zz"), regex.compile("(a+)+$b")
    for _ in range(20_000):
        budget.search(fast, "abc")
    began_at = time.thread_time()
    with pytest.raises(SearchTooSlow):
        budget.search(slow, "a" * 300)
    assert time.thread_time() - began_at < 0.25, "20,000 searches have 0.4 s without a bound"


class Interrupted:
    """A pattern during whose search the machine is busy with something else."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self._pattern = regex.compile(pattern)

    def search(self, *args: Any, **options: Any) -> Any:
        time.sleep(2 * REQUEST_BUDGET_S)
        return self._pattern.search(*args, **options)


def test_time_that_others_take_does_not_count() -> None:
    matcher = make_matcher(r"\d\d")
    matcher._pattern = Interrupted(r"\d\d")
    assert matcher.feed("abc12") == 5


def test_a_match_longer_than_the_limit_is_not_seen_and_little_is_held_back() -> None:
    stops = StopStrings([], ["a[^z]*z"])
    sent, matched = stops.push("a" + "b" * 600 + "z")
    assert matched is None
    assert len(sent) > 600 - MAX_MATCH_CHARS


@pytest.mark.parametrize("pattern", ["(?(DEFINE)(?<q>(?&q)))(?&q)", "(?R)a", "(?:(?R))a"])
def test_an_expression_that_calls_itself_without_end_is_refused_or_takes_too_long(
    pattern: str,
) -> None:
    began = time.thread_time()

    def use() -> None:
        compile_stop_regex(pattern)
        make_matcher(pattern).feed("a" * 100)

    with pytest.raises((InvalidRequest, SearchTooSlow)):
        use()
    assert time.thread_time() - began < 1.0


def test_a_search_that_runs_out_of_memory_ends_its_request_and_nothing_else() -> None:
    matcher = make_matcher("a")

    class Endless:
        pattern = "a"

        def search(self, *_: Any, **__: Any) -> None:
            raise MemoryError

    matcher._pattern = Endless()
    with pytest.raises(SearchTooSlow):
        matcher.feed("a")
