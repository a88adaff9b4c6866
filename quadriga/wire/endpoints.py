"""Addresses of the links between processes. Each process binds its own inbox."""

from dataclasses import dataclass
from pathlib import Path

from quadriga.wire.node_links import ON_THIS_MACHINE, NodeLinks


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Addresses of a run's inner links: ipc sockets in its private directory.

    Several replicas have all links but `public` once each. Where a replica is on another machine,
    `links` has the addresses of `scheduler` and `delivery`, and of the ranks on further machines.

    | link       | binds          | connects                      | carries            |
    |------------|----------------|-------------------------------|--------------------|
    | scheduler  | scheduler_proc | tokenizer_proc, detok_proc    | SchedulerMessage   |
    | worker     | worker_proc    | scheduler_proc                | WorkerMessage      |
    | results    | scheduler_proc | worker_proc                   | ResultMessage      |
    | detok      | detok_proc     | scheduler_proc                | DetokMessage       |
    | delivery   | tokenizer_proc | detok_proc                    | [address, message] |
    | public     | tokenizer_proc | clients, if it is private     | ClientMessage      |
    """

    run_dir: Path
    links: NodeLinks = ON_THIS_MACHINE

    def of_replica(self, number: int) -> "Endpoints":
        """Return the addresses of one replica among several, which has a directory of its own."""
        return Endpoints(replica_dir(self.run_dir, number))

    def _ipc(self, name: str) -> str:
        return f"ipc://{self.run_dir}/{name}"

    @property
    def scheduler(self) -> str:
        """Address of the scheduler's messages."""
        return self.links.scheduler or self._ipc("scheduler")

    @property
    def worker(self) -> str:
        """Address of the worker, or of its rank 0."""
        return self.rank(0)

    def rank(self, rank: int) -> str:
        """Return the address of a TP rank, which receives every message that rank 0 receives."""
        return self.links.rank(rank) or self._ipc(f"worker-{rank}")

    @property
    def results(self) -> str:
        """Address of the worker's results, at the scheduler."""
        return self._ipc("results")

    @property
    def detok(self) -> str:
        """Address of the detokenizer."""
        return self._ipc("detok")

    @property
    def delivery(self) -> str:
        """Address of messages to clients, at the frontend."""
        return self.links.delivery or self._ipc("delivery")

    @property
    def public(self) -> str:
        """Address of the public socket of a server that only its owner may reach."""
        return self._ipc("public")


def replica_dir(run_dir: Path, number: int) -> Path:
    """Return the directory of one replica among several. Its name is in the replica's journal."""
    return run_dir / f"{run_dir.name}-{number}"
