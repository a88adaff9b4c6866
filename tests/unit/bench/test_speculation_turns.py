"""Servers with and without drafts take turns with a load, and the table compares them."""

import asyncio
from typing import Any, cast

import pytest

from bench import speculation as bench
from bench.speculation import DraftTask
from quadriga.client import AsyncClient

CLIENTS = {name: cast(AsyncClient, name) for name in ("without", "with")}


def test_a_row_compares_a_variant_with_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[Any, list[list[DraftTask]]] = {client: [] for client in CLIENTS.values()}

    async def run(client: AsyncClient, tasks: list[DraftTask]) -> bench.TimedRun:
        """With drafts, half of them are right."""
        sent[client].append(tasks)
        is_drafting = client is CLIENTS["with"]
        rate = 60.0 if is_drafting else 90.0
        drafts = (1, 4, 2) if is_drafting else (0, 0, 0)
        return bench.TimedRun(rate, 2 * rate, ["text"] * len(tasks), drafts)

    monkeypatch.setattr(bench, "run", run)
    turns = asyncio.run(bench.measure(CLIENTS, "chat", 4, bench.Limits(3, 1000.0, 16)))
    assert sent[CLIENTS["with"]] == sent[CLIENTS["without"]]
    assert len(sent[CLIENTS["with"]]) == 3
    without, with_drafts = bench.rows_of("chat", 4, turns)
    assert without[:5] == ["chat", "4", "without", "90", "1.00 (1.00 to 1.00)"]
    assert with_drafts[2:6] == ["with", "60", "0.67 (0.67 to 0.67)", "0.67 (0.67 to 0.67)"]
    assert with_drafts[6:] == ["50 % of 12", "3.0", "12 of 12"]
