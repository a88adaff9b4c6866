"""Descriptions of another server (how to install, start and measure it) and of the workloads."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench.models.checkpoint import ModelName
from bench.models.files import Weights


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


@dataclass(frozen=True, slots=True)
class Start:
    """The arguments with which a server is started; `program` is the result of `Peer.install`."""

    program: Path
    port: int
    workload: PeerWorkload
    weights: Weights


@dataclass(frozen=True, slots=True)
class Peer:
    """Another server.

    Attributes:
        install: Installs it if necessary, and returns the program.
        command: Returns the command line of a server for a workload; workloads with the same
            command line share a server.
        weights: Weight formats that it can serve.
        environment: Environment variables of its processes.
        extra_body: As in bench.serving, like prompt_form.
    """

    name: str
    install: Callable[[], Path]
    command: Callable[[Start], list[str]]
    weights: tuple[Weights, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    prompt_form: Literal["ids", "text"] = "ids"

    def target(self, port: int, model: str) -> list[str]:
        """Return the flags of bench.serving for its server at `port`, which serves `model`."""
        return [
            *("--backend", "openai", "--base-url", f"http://127.0.0.1:{port}"),
            *("--model", model, "--extra-body", json.dumps(dict(self.extra_body))),
        ]


WORKLOADS = {
    workload.name: workload
    for workload in (
        PeerWorkload("W1", "smollm2", 128, 128, concurrency=1, num_requests=8),
        PeerWorkload("W2", "smollm2", 128, 128, concurrency=8, num_requests=32),
        PeerWorkload("W3", "smollm2", 256, 128, concurrency=32, num_requests=64),
        PeerWorkload("W4", "smollm2", 1024, 32, concurrency=8, num_requests=16),
        PeerWorkload("W5", "gpt2", 4, 8, concurrency=32, num_requests=32),
        PeerWorkload("W6", "gpt2", 128, 128, concurrency=16, num_requests=48),
        PeerWorkload("W7", "gemma3", 128, 128, concurrency=1, num_requests=8),
        PeerWorkload("W8", "gemma3", 128, 128, concurrency=8, num_requests=32),
        PeerWorkload("W9", "gemma3", 1024, 32, concurrency=8, num_requests=16),
    )
}


def workloads_of(weights: Weights) -> list[str]:
    """Return the names of the workloads whose model has these weights."""
    is_file = weights == "q4_k_m"
    return [name for name, work in WORKLOADS.items() if (work.model == "gemma3") == is_file]
