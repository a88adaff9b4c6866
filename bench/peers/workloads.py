"""Workloads of the comparison: greedy, ignoring the end of text, with unique prompts."""

from dataclasses import dataclass

from bench.models.checkpoint import ModelName


@dataclass(frozen=True, slots=True)
class PeerWorkload:
    """One workload: a closed loop of `concurrency` requests, with lengths in tokens."""

    name: str
    model: ModelName
    input_len: int
    output_len: int
    concurrency: int
    num_requests: int

    def flags(self) -> list[str]:
        """Return the flags of bench.serving for this workload."""
        return [
            *("--random-input-len", str(self.input_len)),
            *("--max-new-tokens", str(self.output_len), "--no-stop-on-eos"),
            *("--num-requests", str(self.num_requests)),
            *("--max-concurrency", str(self.concurrency)),
        ]

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.model}, {self.input_len} in, {self.output_len} out,"
            f" {self.concurrency} at a time, {self.num_requests} requests"
        )


WORKLOADS = {
    workload.name: workload
    for workload in (
        PeerWorkload("W1", "smollm2", 128, 128, concurrency=1, num_requests=8),
        PeerWorkload("W2", "smollm2", 128, 128, concurrency=8, num_requests=32),
        PeerWorkload("W3", "smollm2", 256, 128, concurrency=32, num_requests=64),
        PeerWorkload("W4", "smollm2", 1024, 32, concurrency=8, num_requests=16),
        PeerWorkload("W5", "gpt2", 4, 8, concurrency=32, num_requests=32),
        PeerWorkload("W6", "gpt2", 128, 128, concurrency=16, num_requests=48),
    )
}
