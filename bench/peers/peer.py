"""What is to be known of another server: how it is installed, started and asked."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench.models.files import Weights
from bench.peers.workloads import Workload


@dataclass(frozen=True, slots=True)
class Start:
    """What a server is started for. program: what `Peer.install` returned."""

    program: Path
    port: int
    workload: Workload
    weights: Weights


@dataclass(frozen=True, slots=True)
class Peer:
    """Another server.

    version: what is installed. install: does that where it is not yet done, and returns the
    program. command: the command line, of a server for this workload; where two workloads have the
    same one, one server serves both. weights: those that it can serve. environment: variables of
    its processes. extra_body, prompt_form: as bench.serving knows them. note: for the reader of
    the table.
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
        """The flags of bench.serving that name its server. model: the name that it goes by."""
        return [
            *("--backend", "openai", "--base-url", f"http://127.0.0.1:{port}"),
            *("--model", str(model), "--extra-body", json.dumps(dict(self.extra_body))),
        ]
