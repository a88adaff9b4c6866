"""ReplicaArgs: the flags of several replicas, and which of them a process belongs to."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from quadriga.config.flags import check_positive, flag
from quadriga.errors import ConfigError, InvalidRequest

BY_CACHE, BY_LOAD, IN_TURN = LOAD_BALANCE_METHODS = ("cache-aware", "least-loaded", "round-robin")
ONE_MACHINE, RAY = CLUSTERS = ("none", "ray")
NEEDS_CLUSTER = "works with --cluster ray only"
# Of the number of replicas that follows the load.
TARGET_REQUESTS, UP_AFTER_S, DOWN_AFTER_S = 32, 5.0, 300.0

# Of the directories in --journal.
REPLICA_PREFIX = "replica-"

CLUSTER_FLAGS = ("ray_address", "replica_cpus", "nnodes", "max_replicas")
SCALING_FLAGS = ("min_replicas", "target_ongoing_requests", "scale_up_after", "scale_down_after")


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
    nnodes: int | None = flag(
        None,
        "machines of each replica, over which its --tp ranks are split (default: 1, or as few as"
        " have so many GPUs)",
    )
    min_replicas: int | None = flag(
        None, "least number of replicas, where it follows the load (default: 1)"
    )
    max_replicas: int | None = flag(
        None,
        "the number of replicas follows the load, up to this one; --dp start (default: there are"
        " always --dp)",
    )
    target_ongoing_requests: int = flag(
        TARGET_REQUESTS, "open requests for each replica, where their number follows the load"
    )
    scale_up_after: float = flag(
        UP_AFTER_S, "time with more than --target-ongoing-requests before replicas are added",
        unit="SECONDS",
    )  # fmt: skip
    scale_down_after: float = flag(
        DOWN_AFTER_S, "time in which one replica less would do, before one leaves", unit="SECONDS"
    )

    def validate(self) -> None:
        """Raise ConfigError for the first flag that cannot work."""
        check_positive(self, "dp", "replica_cpus", "nnodes", "min_replicas", "max_replicas")
        check_positive(self, "target_ongoing_requests")
        for name in ("scale_up_after", "scale_down_after"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be 0 or more (it is {getattr(self, name)})")
        for name in CLUSTER_FLAGS:
            if self.cluster == ONE_MACHINE and getattr(self, name) != _default(name):
                raise ConfigError(f"{name} {NEEDS_CLUSTER}")
        for name in SCALING_FLAGS:
            if self.max_replicas is None and getattr(self, name) != _default(name):
                raise ConfigError(f"{name} works with --max-replicas only")
        self._check_bounds()

    def _check_bounds(self) -> None:
        low, high = self.num_at_least, self.num_slots
        if low > high:
            raise ConfigError(
                f"min_replicas is {low} and max_replicas is {high}: the first must not be larger"
            )
        if self.dp > high:
            raise ConfigError(
                f"dp is {self.dp} and max_replicas is {high}: start with {high} or less"
            )

    @property
    def follows_load(self) -> bool:
        """Whether the number of replicas follows the load."""
        return self.max_replicas is not None

    @property
    def num_slots(self) -> int:
        """Largest number of replicas."""
        return self.dp if self.max_replicas is None else self.max_replicas

    @property
    def num_at_least(self) -> int:
        """Least number of replicas."""
        return self.dp if self.max_replicas is None else self.min_replicas or 1

    @property
    def num_at_start(self) -> int:
        """Number of replicas at the start."""
        return max(self.dp, self.num_at_least)

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
        if self.in_cluster:
            return ReplicaPlace(num_machines=self.nnodes or 1)
        return ReplicaPlace(number, self.dp)


def _default(name: str) -> Any:
    return next(field.default for field in fields(ReplicaArgs) if field.name == name)


def journal_dir(journal: str, number: int) -> Path:
    """Return the directory of one replica's journal, among several. journal: --journal."""
    return Path(journal) / f"{REPLICA_PREFIX}{number}"


class ReplicaPlace(NamedTuple):
    """Which replica of its machine a process belongs to, from 0 on, and how many there are.

    Attributes:
        num_machines: number of machines over which the ranks of the replica are split.
    """

    number: int = 0
    num_replicas: int = 1
    num_machines: int = 1

    def ranks_per_machine(self, tp: int) -> int:
        """Return how many of `tp` ranks are on each machine of the replica."""
        return tp // self.num_machines


ONLY_REPLICA = ReplicaPlace()


def check_replica(number: int, num_replicas: int) -> None:
    """Raise InvalidRequest if a server of so many replicas has none of this number."""
    if not 0 <= number < num_replicas:
        there = "the only one is 0" if num_replicas == 1 else f"0 to {num_replicas - 1} are there"
        raise InvalidRequest(f"replica is {number}: {there}", "replica")
