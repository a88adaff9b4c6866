"""On fixed loads the scheduler decides as it did when the hashes were committed.

If a difference is wanted, run `python -m tests.unit.decisions --write` and give the reason in the
commit.
"""

import pytest

from tests.unit.decision_traces import TRACES
from tests.unit.decisions import CHAOS, cases, expected, summaries


@pytest.mark.parametrize("group", [*TRACES, *CHAOS])
def test_the_scheduler_decides_and_sends_what_it_did_before(group: str) -> None:
    names = [name for name in (*cases(), *CHAOS) if name.split("/")[0] == group]
    known = {name: summary for name, summary in expected().items() if name.split("/")[0] == group}
    actual = summaries(names)
    assert list(known) == names, "cases were added or left out"
    changed = [name for name in names if actual[name] != known[name]]
    assert not changed, (
        f"{len(changed)} of {len(names)} logs differ: compare the output of"
        f" `python -m tests.unit.decisions --log {changed[0]}` with that of the version before;"
        f" all of them: {', '.join(changed)}"
    )
