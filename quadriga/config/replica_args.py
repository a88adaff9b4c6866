"""ReplicaArgs: the flags of several replicas, and which of them a process belongs to."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from quadriga.config.flags import check_positive, flag
from quadriga.errors import InvalidRequest

BY_CACHE, BY_LOAD, IN_TURN = LOAD_BALANCE_METHODS = ("cache-aware", "least-loaded", "round-robin")

# Of the directories in --journal.
REPLICA_PREFIX = "replica-"


@dataclass(frozen=True, slots=True)
class ReplicaArgs:
    """Replicas (launcher.py, tokenizer_proc)."""

    dp: int = flag(
        1,
        "replicas of the model on this machine, each with scheduler, worker and detokenizer of its"
        " own, behind one endpoint: see docs/scale.md",
        alias="data_parallel_size",
    )
    load_balance_method: str = flag(
        BY_CACHE,
        "choice of the replica of a request. cache-aware: by its cached prefix and by load",
        LOAD_BALANCE_METHODS,
    )

    def validate(self) -> None:
        """Raise ConfigError for the first flag that cannot work."""
        check_positive(self, "dp")


def journal_dir(journal: str, number: int) -> Path:
    """Return the directory of one replica's journal, among several. journal: --journal."""
    return Path(journal) / f"{REPLICA_PREFIX}{number}"


class ReplicaPlace(NamedTuple):
    """The replica of a process: its number, from 0 on, and the number of replicas."""

    number: int = 0
    num_replicas: int = 1


ONLY_REPLICA = ReplicaPlace()


def check_replica(number: int, num_replicas: int) -> None:
    """Raise InvalidRequest if a server of so many replicas has none of this number."""
    if not 0 <= number < num_replicas:
        there = "the only one is 0" if num_replicas == 1 else f"0 to {num_replicas - 1} are there"
        raise InvalidRequest(f"replica is {number}: {there}", "replica")
