"""The load is reported when it has changed, and not more often than it has to be."""

import asyncio

import pytest

from tokenizer_proc.replicas import links
from tokenizer_proc.replicas.links import LoadReport


async def test_many_changes_are_one_report_and_the_same_load_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "LOAD_INTERVAL_S", 0.0)
    reports: list[int] = []
    loads = iter((0, 3, 0, 0, 5))
    report = LoadReport(lambda: next(loads), reports.append)
    for _ in range(5):
        for _ in range(100):
            report.on_change()
        await asyncio.sleep(0)
        while report._timer is not None:
            await asyncio.sleep(0)
    assert reports == [0, 3, 0, 5]
    assert next(loads, None) is None
