"""The table of links: who binds, who connects, where. Everyone binds its own inbox."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Addresses of one run's inner links, ipc sockets in its private directory.

    | link       | binds          | connects                      | carries            |
    |------------|----------------|-------------------------------|--------------------|
    | scheduler  | scheduler_proc | tokenizer_proc, detok_proc    | SchedulerMessage   |
    | worker     | worker_proc    | scheduler_proc                | WorkerMessage      |
    | results    | scheduler_proc | worker_proc                   | ResultMessage      |
    | detok      | detok_proc     | scheduler_proc                | DetokMessage       |
    | delivery   | tokenizer_proc | detok_proc                    | [address, message] |
    """

    run_dir: Path

    def _ipc(self, name: str) -> str:
        return f"ipc://{self.run_dir}/{name}"

    @property
    def scheduler(self) -> str:
        return self._ipc("scheduler")

    @property
    def worker(self) -> str:
        return self.rank(0)

    def rank(self, rank: int) -> str:
        """Of another rank of a worker that is several processes: it hears what rank 0 hears."""
        return self._ipc(f"worker-{rank}")

    @property
    def results(self) -> str:
        return self._ipc("results")

    @property
    def detok(self) -> str:
        return self._ipc("detok")

    @property
    def delivery(self) -> str:
        return self._ipc("delivery")
