"""What the launcher passes on of the replicas of a cluster, and keeps for a new frontend."""

from dataclasses import dataclass, field
from typing import cast

import pytest

from quadriga.server.config.server_config import ServerConfig
from quadriga.server.processes.child_process import ChildProcess, ReplicaChange
from quadriga.server.processes.control_channel import Command
from quadriga.server.processes.replicas import DRIVER, FRONTEND, ClusterReplicas
from quadriga.server.processes.supervisor import Supervisor


@dataclass
class FakeChild:
    """A process that keeps its commands."""

    is_ready: bool = True
    sent: list[tuple[Command, str]] = field(default_factory=list)

    def send(self, command: Command, argument: str = "") -> None:
        self.sent.append((command, argument))

    def take(self) -> list[tuple[Command, str]]:
        sent, self.sent = self.sent, []
        return sent


class World:
    """Two replicas that have joined, of three at most."""

    def __init__(self) -> None:
        config = ServerConfig().replace(cluster="ray", dp=2, max_replicas=3)
        self.frontend, self.driver = FakeChild(), FakeChild()
        self.replicas = ClusterReplicas(config)
        for number in range(2):
            self.report(number, "joined", f"tcp://s{number} tcp://d{number}")
        self.frontend.take()

    def report(self, number: int, state: str, argument: str = "") -> None:
        supervisor = {FRONTEND: self.frontend, DRIVER: self.driver}
        self.replicas.on_report(
            ReplicaChange(number, state, argument), cast("Supervisor", supervisor)
        )

    def new_frontend(self) -> list[tuple[Command, str]]:
        frontend = FakeChild()
        self.replicas.report_lost(cast("ChildProcess", frontend))
        return frontend.take()


def test_a_replica_that_leaves_ends_when_its_requests_have_moved(
    capsys: pytest.CaptureFixture[str],
) -> None:
    world = World()
    world.report(1, "leaving")
    assert world.frontend.take() == [(Command.RECALL, "1")]
    assert (Command.RECALL, "1") in world.new_frontend()
    assert world.driver.take() == []
    world.report(1, "recalled")
    assert world.driver.take() == [(Command.REMOVE, "1")]
    world.report(1, "left")
    assert world.frontend.take() == [(Command.LEFT, "1")]
    assert world.new_frontend() == [(Command.JOINED, "0 tcp://s0 tcp://d0")]
    assert (
        "replica 1 has left, as there is little to do: 1 replica serves" in capsys.readouterr().err
    )


def test_a_replica_that_is_lost_while_it_leaves_is_recalled_from_no_new_frontend() -> None:
    world = World()
    world.report(1, "leaving")
    world.report(1, "lost", "its machine is gone")
    assert world.frontend.take() == [(Command.RECALL, "1"), (Command.LOST, "1")]
    assert world.new_frontend() == [(Command.JOINED, "0 tcp://s0 tcp://d0")]
    world.report(1, "left")
    assert world.frontend.take() == []


def test_the_load_goes_to_the_driver_and_again_to_one_that_was_restarted() -> None:
    world = World()
    world.report(-1, "load", "40")
    assert world.driver.take() == [(Command.LOAD, "40")]
    world.report(2, "joined", "tcp://s2 tcp://d2")
    assert world.driver.take() == [(Command.LOAD, "40")]
