"""ReplicaArgs: the flags of several replicas, and which of them a process belongs to."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from quadriga.config.flags import check_positive, flag
from quadriga.errors import ConfigError, InvalidRequest

BY_CACHE, BY_LOAD, IN_TURN = LOAD_BALANCE_METHODS = ("cache-aware", "least-loaded", "round-robin")
ONE_MACHINE, RAY = CLUSTERS = ("none", "ray")
NEEDS_CLUSTER = "works with --cluster ray only"
# Of the number of replicas that follows the load.
TARGET_REQUESTS, UP_AFTER_S, DOWN_AFTER_S = 32, 5.0, 300.0

# Of the directories in --journal.
REPLICA_PREFIX = "replica-"


@dataclass(frozen=True, slots=True)
class ReplicaArgs:
    """Replicas (launcher.py, tokenizer_proc, cluster_proc)."""

    dp: int = flag(
        1,
        "replicas of the model, each with scheduler, worker and detokenizer of its own, behind one"
        " endpoint: see docs/scale.md",
        alias="data_parallel_size",
    )
    load_balance_method: str = flag(
        BY_CACHE,
        "choice of the replica of a request. cache-aware: by its cached prefix and by load",
        LOAD_BALANCE_METHODS,
    )
    cluster: str = flag(
        ONE_MACHINE,
        "machines of the replicas. none: this one; ray: those of a Ray cluster, on which Ray places"
        " each replica",
        CLUSTERS,
    )
    ray_address: str = flag("auto", "address of the Ray cluster; auto: that of this machine")
    replica_cpus: float = flag(1.0, "CPUs of its machine that Ray sets aside for a replica")

    def validate(self) -> None:
        """Raise ConfigError for the first flag that cannot work."""
        check_positive(self, "dp", "replica_cpus")
        for name, default in (("ray_address", "auto"), ("replica_cpus", 1.0)):
            if self.cluster == ONE_MACHINE and getattr(self, name) != default:
                raise ConfigError(f"{name} {NEEDS_CLUSTER}")

    @property
    def in_cluster(self) -> bool:
        """Whether replicas are on the machines of a cluster."""
        return self.cluster != ONE_MACHINE

    @property
    def has_router(self) -> bool:
        """Whether the frontend chooses a replica for each request."""
        return self.dp > 1 or self.in_cluster

    def place_of(self, number: int) -> "ReplicaPlace":
        """Return which part of its machine a replica has. In a cluster it has all that it sees."""
        return ONLY_REPLICA if self.in_cluster else ReplicaPlace(number, self.dp)


def journal_dir(journal: str, number: int) -> Path:
    """Return the directory of one replica's journal, among several. journal: --journal."""
    return Path(journal) / f"{REPLICA_PREFIX}{number}"


class ReplicaPlace(NamedTuple):
    """Which replica of its machine a process belongs to, from 0 on, and how many there are."""

    number: int = 0
    num_replicas: int = 1


ONLY_REPLICA = ReplicaPlace()


def check_replica(number: int, num_replicas: int) -> None:
    """Raise InvalidRequest if a server of so many replicas has none of this number."""
    if not 0 <= number < num_replicas:
        there = "the only one is 0" if num_replicas == 1 else f"0 to {num_replicas - 1} are there"
        raise InvalidRequest(f"replica is {number}: {there}", "replica")
