"""The frame of every child process: flags, control channel, signals, logging and exit codes."""

import argparse
import faulthandler
import gc
import logging
import os
import pkgutil
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quadriga import clock, errors
from quadriga.server.config import engine_args, server_config
from quadriga.server.config import server_config as configuration
from quadriga.server.processes.control_channel import EXIT_OK, EXIT_START_FAILED, ControlChannel
from quadriga.server.processes.logs import drop_unwritten, log_exception, set_up_logging
from quadriga.server.processes.machine import pin_to, plan_cpus
from quadriga.server.processes.process_name import ProcessName
from quadriga.server.processes.run_dir import shared_dir
from quadriga.wire import client, sockets
from quadriga.wire.links import Endpoints, NodeLinks, replica_dir

LOW_PRIORITY_NICENESS = 10
# Its value MODULE:FUNCTION names a function for debugging, which every process calls with its own
# name before it opens a socket.
HOOK_VARIABLE = "QUADRIGA_PROCESS_HOOK"
# A child that receives it logs the stacks of its threads.
DUMP_SIGNAL = signal.SIGUSR1
# A child that receives it logs the stacks of its threads, and then it dies of the signal.
KILL_SIGNAL = signal.SIGUSR2


@dataclass(frozen=True, slots=True)
class Child:
    """The configuration and the channels that the body of a process works with.

    Attributes:
        is_restart: the process takes the place of one that died.
        replica: which part of its machine its replica has, but for the frontend and the gateway.
        number: of that replica in the server.
        has_status_line: the scheduler keeps a live line on the terminal.
        models_file: path of the list of models that the gateway serves; "": the only model is that
            of the config.
        of_model: name of its model, where the server has several.
        suspension_dir: directory of the pages of requests that a suspension interrupts; "": none.
        server_dir: directory of the server's run, which all its processes have in common.
    """

    config: server_config.ServerConfig
    endpoints: Endpoints
    control: ControlChannel
    is_restart: bool = False
    replica: engine_args.ReplicaPlace = engine_args.ONLY_REPLICA
    has_status_line: bool = False
    models_file: str = ""
    of_model: str = ""
    suspension_dir: str = ""
    server_dir: Path = Path()
    number: int = 0

    @property
    def pages_dir(self) -> str:
        """Directory of the KV pages that the replicas of its model on this machine exchange."""
        return str(shared_dir(self.server_dir) / self.endpoints.run_dir.parent.name)

    @property
    def public_endpoint(self) -> str:
        """Address of the public socket."""
        endpoint = self.config.frontend.endpoint
        return self.endpoints.public if endpoint == client.PRIVATE_ENDPOINT else endpoint

    def ready(self, **info: Any) -> None:
        """Report that this process serves; `info` is shown in the launcher's start lines."""
        self.control.report("ready", pid=os.getpid(), **info)

    def begin_phase(self, what: str) -> None:
        """Report the begin of a phase of the start, which a terminal shows."""
        self.control.report("begin", what=what)

    def phase(self, what: str, seconds: float) -> None:
        """Report the end of a phase of the start."""
        self.control.report("phase", what=what, seconds=round(seconds, 3))


def place_flags(name: ProcessName, run_dir: Path, model_dir: Path) -> list[str]:
    """Return the flags that say where a process belongs, and make the directory of its replica.

    Args:
        name: the process.
        run_dir: directory of the server's run.
        model_dir: directory of its model's sockets, which is `run_dir` where there is one model.
    """
    directory, replica = model_dir, []
    if name.replica is not None:
        directory = replica_dir(model_dir, name.replica)
        replica = ["--replica", str(name.replica)]
    for path in (model_dir, directory):
        path.mkdir(0o700, exist_ok=True)
    model = ["--of-model", name.model] if name.model else []
    return ["--run-dir", str(directory), "--server-dir", str(run_dir), *replica, *model]


def run_child(name: str, body: Callable[[Child], None], low_priority: bool = False) -> None:
    """Run `python -m <name>`: parse flags, run `body`, report what went wrong.

    Args:
        name: the process.
        body: the work of the process; it returns when the process has finished.
        low_priority: leave a core to the worker if both need it.
    """
    log_stacks_on_signals()
    gc.freeze()  # what was imported stays, and no search for garbage looks at it
    gc.enable()
    arguments = _parse(name)
    if arguments.clock_offset is not None:
        clock.use_offset(arguments.clock_offset)
    descriptor = arguments.control_fd
    connection = None if descriptor is None else socket.socket(fileno=descriptor)
    run_dir = Path(arguments.run_dir)
    server_dir = Path(arguments.server_dir or run_dir)
    control = ControlChannel(connection, server_dir)
    try:
        config = configuration.from_namespace(arguments)
        name = str(ProcessName(name, arguments.replica, arguments.of_model))
        replica = config.replicas.place_of(arguments.replica or 0)
        set_up_logging(name, config.launch.log_level, config.launch.log_format)
        if connection is not None:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
        if low_priority:
            os.nice(LOW_PRIORITY_NICENESS)
            pin_to(plan_cpus(config.worker, replica).others)
        _call_hook(name)
        logging.debug("starting as process %d%s", os.getpid(), _in_place_of(arguments))
        links = NodeLinks(
            arguments.scheduler_address,
            arguments.delivery_address,
            config.frontend.curve_dir,
            ranks=tuple(arguments.rank_addresses.split(",")) if arguments.rank_addresses else (),
            pages=arguments.pages_address,
        )
        endpoints = Endpoints(run_dir, links)
        body(
            Child(
                config,
                endpoints,
                control,
                arguments.is_restart,
                replica,
                has_status_line=arguments.has_status_line,
                models_file=arguments.models_file,
                of_model=arguments.of_model,
                suspension_dir=arguments.suspension_dir,
                server_dir=server_dir,
                number=arguments.replica or 0,
            )
        )
        logging.debug("stopped")
    except KeyboardInterrupt:
        pass
    except errors.QuadrigaError as error:
        _fatal(control, f"{type(error).__name__}: {error}", error.code)
    except Exception as error:
        with suppress(OSError):  # the log is on a full disk
            log_exception()
        _fatal(control, f"{type(error).__name__}: {error}")
    sockets.close_all()
    drop_unwritten()
    # Python would free every object one by one, which takes a third of a second with torch.
    os._exit(EXIT_OK)


def log_stacks_on_signals() -> None:
    """Make this process log the stacks of its threads on DUMP_SIGNAL, KILL_SIGNAL and a crash."""
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL)
    faulthandler.register(KILL_SIGNAL, chain=True)


def _in_place_of(arguments: argparse.Namespace) -> str:
    return ", in place of one that died" if arguments.is_restart else ""


def _call_hook(name: str) -> None:
    """Call the function that HOOK_VARIABLE names. Raise ConfigError if it cannot be imported."""
    hook = os.environ.get(HOOK_VARIABLE)
    if not hook:
        return
    try:
        function = pkgutil.resolve_name(hook)
    except (ImportError, AttributeError, ValueError) as error:
        raise errors.ConfigError(
            f"{HOOK_VARIABLE} is {hook!r}, which cannot be imported as MODULE:FUNCTION: {error}"
        ) from None
    function(name)


def _fatal(control: ControlChannel, message: str, code: str = errors.ServerFailed.code) -> None:
    control.report("fatal", message=message, code=code)
    drop_unwritten()
    sockets.close_all()
    os._exit(EXIT_START_FAILED)


def _parse(name: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(f"python -m {name}")
    parser.add_argument("--run-dir", required=True, help="directory of this run's sockets (0700)")
    parser.add_argument("--server-dir", help="directory of the run (default: --run-dir)")
    parser.add_argument("--of-model", default="", help="name of its model, among several")
    parser.add_argument("--suspension-dir", default="", help="of pages that a suspension keeps")
    parser.add_argument("--control-fd", type=int, help="inherited socket to the launcher")
    parser.add_argument(
        "--clock-offset", type=float, help="offset of the server's clock, in seconds"
    )
    parser.add_argument("--replica", type=int, help="number of its replica, among several")
    parser.add_argument("--scheduler-address", default="", help="if it is not in the run directory")
    parser.add_argument("--delivery-address", default="", help="if it is not in the run directory")
    parser.add_argument(
        "--rank-addresses", default="", help="ADDRESS,… of ranks that are not in the run directory"
    )
    parser.add_argument("--pages-address", default="", help="where other machines get KV pages")
    parser.add_argument("--is-restart", action="store_true", help="the process before it died")
    parser.add_argument("--has-status-line", action="store_true", help="show a live status line")
    parser.add_argument(
        "--models-file", default="", help="list of the server's models, for the gateway"
    )
    configuration.add_flags(parser)
    return parser.parse_args()
