"""The load of bench.side_by_side, and what it makes of the records of its turns."""

import pytest

from bench.load.mixed_prompts import LONG_CLIENT, LONG_INPUT
from bench.metrics.records import RequestRecord
from bench.side_by_side.__main__ import MixedFigures, figures_of, main, mixed_load, table


def test_the_long_prompt_comes_among_the_short_ones_of_the_second_part() -> None:
    load = mixed_load(20, 4.0)
    alone, among = load.requests[: load.first_among], load.requests[load.first_among :]
    long = [request for request in load.requests if request.client == LONG_CLIENT]
    assert len(alone) == 20 and len(among) == 21
    assert long[0] in among and [request.num_own_tokens for request in long] == [LONG_INPUT]
    assert alone[-1].at < among[0].at < long[0].at < among[-1].at
    segments = [request.segments[0][0] for request in load.requests]
    assert len(set(segments)) == len(segments), "prompts have nothing in common"


def record(
    index: int, sent_at: float, ttft_s: float, client: int = 0, tokens: int = 10
) -> RequestRecord:
    return RequestRecord(
        index,
        submit_start=sent_at,
        arrivals=[sent_at + ttft_s],
        finished=sent_at + ttft_s + 1.0,
        completion_tokens=tokens,
        client=client,
    )


def turn(among_s: float) -> list[RequestRecord]:
    return [
        record(0, 0.0, 0.1),
        record(1, 1.0, 0.1),
        record(2, 10.0, among_s),
        record(3, 11.0, 7.0, client=LONG_CLIENT, tokens=20),
    ]


def test_the_figures_are_those_of_each_part() -> None:
    failed = RequestRecord(4, submit_start=12.0, error="queue_full")
    figures = figures_of([turn(0.2), [*turn(0.2), failed]], first_among=2)
    assert figures.alone_s == pytest.approx([0.1] * 4)
    assert figures.among_s == pytest.approx([0.2] * 2)
    assert figures.long_s == pytest.approx([7.0] * 2)
    assert figures.tokens_per_s == pytest.approx([30 / 9.0] * 2)  # from 10.0 to 19.0
    assert figures.ratio == pytest.approx(2.0)
    assert figures.num_failed == 1


def test_the_table_has_ratios_to_the_first_variant() -> None:
    first = MixedFigures([0.05], [5.0], [9.0], [40.0], 0)
    lines = table({"one": first, "two": MixedFigures([0.05], [0.1], [12.0], [38.0], 0)})
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines.splitlines()]
    assert rows[2][3:] == ["100.00", "9.0", "40.0", "1.000"]
    assert rows[3] == ["two", "50 / 50", "100 / 100", "2.00", "12.0", "38.0", "0.950"]


def test_wrong_numbers_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--turns", "0"]) == 2
    assert main(["--variant", "no colon"]) == 2
    assert "is no variant" in capsys.readouterr().err
