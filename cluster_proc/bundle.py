"""What a replica needs of the machines of a cluster."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bundle:
    """What a replica needs of each of its machines.

    Attributes:
        num_machines: number of its machines.
    """

    cpus: float
    gpus: int
    num_machines: int = 1

    @property
    def resources(self) -> dict[str, float]:
        """What it needs of one machine, in Ray's terms."""
        return {"CPU": self.cpus, **({"GPU": float(self.gpus)} if self.gpus else {})}

    def __str__(self) -> str:
        amounts = ", ".join(f"{amount:g} {name}" for name, amount in self.resources.items())
        if self.num_machines == 1:
            return f"a machine with {amounts} free"
        return f"{self.num_machines} machines with {amounts} free on each"


def fewest_machines(tp: int, gpus: Sequence[int]) -> int:
    """Return the least number of machines that have the GPUs for `tp` ranks, equally many on each.

    Args:
        tp: number of ranks, each on a GPU of its own.
        gpus: number of GPUs of each machine.

    Returns:
        1 also where no number of these machines has the GPUs: others may join the cluster.
    """
    for num_machines in range(1, tp + 1):
        share = tp // num_machines
        if tp % num_machines == 0 and sum(count >= share for count in gpus) >= num_machines:
            return num_machines
    return 1
