"""Description of another server: how to install, start and measure it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench.models.files import Weights
from bench.peers.workloads import PeerWorkload


@dataclass(frozen=True, slots=True)
class Start:
    """What a server is started for.

    Attributes:
        program: Result of `Peer.install`.
    """

    program: Path
    port: int
    workload: PeerWorkload
    weights: Weights


@dataclass(frozen=True, slots=True)
class Peer:
    """Another server.

    Attributes:
        version: Installed package and version.
        install: Installs it if necessary, and returns the program.
        command: Returns the command line of a server for a workload; workloads with the same
            command line share a server.
        weights: Weight formats that it can serve.
        environment: Environment variables of its processes.
        extra_body: As in bench.serving, like prompt_form.
        note: Remark for the reader of the table.
    """

    name: str
    version: str
    install: Callable[[], Path]
    command: Callable[[Start], list[str]]
    weights: tuple[Weights, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    prompt_form: Literal["ids", "text"] = "ids"
    note: str = ""

    def target(self, port: int, model: Path) -> list[str]:
        """Return the flags of bench.serving for its server at `port`, which serves `model`."""
        return [
            *("--backend", "openai", "--base-url", f"http://127.0.0.1:{port}"),
            *("--model", str(model), "--extra-body", json.dumps(dict(self.extra_body))),
        ]
