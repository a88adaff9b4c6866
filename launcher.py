"""Start the four processes and the web gateway, start again what dies, stop them.

No torch here, and no work of its own.

    python launcher.py [--model smollm2-135m] [--endpoint tcp://127.0.0.1:5555] …

Each child holds one end of a socket pair (quadriga/runtime/child.py): its reports come up, orders
go down, and the end of it says at once that the other side is gone.
"""

import argparse
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from quadriga.clock import Countdown
from quadriga.config import server_config as configuration
from quadriga.config.server_config import ServerConfig
from quadriga.errors import QuadrigaError
from quadriga.model_files.resolve import ModelFiles, resolve_model
from quadriga.runtime import terminal
from quadriga.runtime.child import (
    ABORT,
    DRAIN,
    EXIT_CHILD_DIED,
    EXIT_FORCED,
    EXIT_OK,
    EXIT_START_FAILED,
    EXIT_USAGE,
    FAIL,
)
from quadriga.runtime.open_files import MAX_OPEN_FILES, allow_open_files
from quadriga.supervisor.child_process import EXIT_GRACE, ChildProcess
from quadriga.supervisor.supervisor import Death, Supervisor, SupervisorEvent, say

BEGAN = time.monotonic()
HERE = Path(__file__).resolve().parent
SERVING_NEEDS = (
    "torch",
    "numpy",
    "tokenizers",
    "safetensors",
    "gguf",
    "jinja2",
    "uvloop",
    "psutil",
    "msgpack",
)
HTTP_NEEDS = ("aiohttp", "prometheus_client")
PROCESSES = ("worker_proc", "scheduler_proc", "detok_proc", "tokenizer_proc")
GATEWAY = "http_proc"
NOTIFY_TIMEOUT_S = 1.5
"""Seconds that front door and gateway have to tell the clients that another process died."""
ABORT_TIMEOUT = 5.0
"""Seconds after --shutdown-timeout for the aborted requests to be answered."""


class Launcher:
    """One run of a server, from start to exit code."""

    def __init__(self, config: ServerConfig, model: ModelFiles) -> None:
        self._model_seconds = time.monotonic() - BEGAN
        self._config = config
        location = {"model": model.location, "served_model_name": config.model.shown_name}
        quiet = config.launch.no_status_line or not terminal.is_ours()
        self._flags = config.replace(**location, no_status_line=quiet).to_argv()
        final = ["scheduler_proc"] if config.scheduler.no_journal else []
        self._children = Supervisor(
            self._flags, [str(HERE)], config.launch, final, notify_on_restart="tokenizer_proc"
        )

    def run(self) -> int:
        """Start, serve until a signal or a death for good, stop. Returns the exit code."""
        try:
            for name in PROCESSES if self._config.http.no_http else (*PROCESSES, GATEWAY):
                self._children.start(name)
            return self._wait_until_ready() or self._serve()
        finally:
            self._children.leave_nothing_behind()

    # --- start ------------------------------------------------------------------------------------

    def _wait_until_ready(self) -> int:
        """EXIT_OK once every process has said that it can serve."""
        timeout = Countdown(self._config.launch.start_timeout)
        while not self._children.all_ready:
            event = self._children.next_event(timeout)
            match event:
                case Death():
                    if not self._start_again(event):
                        say(f"error: {event.name} could not start: {event.how}")
                        return EXIT_START_FAILED
                case SupervisorEvent.STOP:
                    say("stopped while starting")
                    return EXIT_FORCED
                case SupervisorEvent.TIMEOUT:
                    say(
                        f"error: {', '.join(self._children.not_ready)} not ready within"
                        f" {self._config.launch.start_timeout:g} s; raise --start-timeout"
                    )
                    return EXIT_START_FAILED
        self._announce()
        return EXIT_OK

    def _announce(self) -> None:
        facts = self._children["worker_proc"].ready or {}
        endpoint = self._config.frontend.endpoint
        say(f"  launcher: find model {self._model_seconds:.1f} s")
        for child in self._children:
            if child.phases:
                say(f"  {child.name}: {', '.join(child.phases)}")
        say(
            f"  KV pool {facts.get('tokens')} tokens · {facts.get('backend')} backend ·"
            f" {facts.get('threads')} worker threads"
            + (f" on CPUs {facts['cpus']}, which the others keep off" if facts.get("cpus") else "")
        )
        say(
            f"quadriga ready in {time.monotonic() - BEGAN:.1f} s · {self._config.model.shown_name}"
            f" {facts.get('dtype')} {facts.get('device')} · zmq {endpoint}"
            + ("" if self._config.http.no_http else f" · {self._config.http.url}")
        )
        where = "" if endpoint == configuration.DEFAULT_ENDPOINT else f" --endpoint {endpoint}"
        say(f'ask it: {sys.executable} -m quadriga ask{where} "Name the capital of France."')

    # --- serve ------------------------------------------------------------------------------------

    def _serve(self) -> int:
        while True:
            event = self._children.next_event(None)
            match event:
                case Death():
                    if not self._start_again(event):
                        return self._give_up(event)
                case SupervisorEvent.STOP:
                    return self._drain()
                case SupervisorEvent.RELOAD:
                    say("reloading: the worker starts again; requests go on with the new weights")
                    self._children.reload("worker_proc")

    def _start_again(self, death: Death) -> bool:
        """Whether the process that died is started again: not where it would only die again."""
        if death.delay is None:
            return False
        say(f"{death.name} died ({death.how}) and is started again; requests go on")
        self._children.start_later(death.name, death.delay)
        return True

    def _give_up(self, death: Death) -> int:
        """A process is dead for good: tell the clients, name it, and leave."""
        message = f"{death.name} died ({death.how}); all open requests are lost"
        self._say_farewell(f"{message}; the server is stopping, start it again")
        say(f"error: {message}. Start the server again; its log above may say why.")
        return EXIT_CHILD_DIED

    def _say_farewell(self, message: str) -> None:
        """Those whom clients are connected to fail what is open, and leave."""
        countdown = Countdown(NOTIFY_TIMEOUT_S)
        speakers = [child for child in self._speakers() if not child.left]
        for child in speakers:
            child.order(FAIL, message)
        for child in speakers:
            if not child.ends_within(countdown):
                child.process.kill()

    def _drain(self) -> int:
        """Finish what runs, within --shutdown-timeout; then abort it; a second signal kills."""
        timeout = self._config.launch.shutdown_timeout
        say(f"stopping: open requests have {timeout:g} s; a second signal ends them now")
        self._children.spare(GATEWAY)
        self._order_drain()
        outcome = self._wait_for_exits(timeout)
        if outcome is None:
            say(f"{timeout:g} s are over: aborting what is left")
            reason = "the server stopped before this request had finished"
            for name in ("tokenizer_proc", "scheduler_proc"):
                self._children[name].order(ABORT, reason)
            outcome = self._wait_for_exits(ABORT_TIMEOUT)
        if outcome is None:
            say("error: some process did not stop in time and is killed")
            return EXIT_FORCED
        if outcome == EXIT_OK:
            say("stopped")
        return outcome

    def _order_drain(self) -> None:
        for child in self._speakers():
            child.order(DRAIN)

    def _wait_for_exits(self, timeout: float) -> int | None:
        """The exit code once every child has left or something went wrong; None at the timeout."""
        countdown = Countdown(timeout)
        while not self._children.all_left:
            event = self._children.next_event(countdown)
            match event:
                case Death() if event.in_order or event.name == GATEWAY:
                    continue  # the streams of a gateway that died are broken, and none may come
                case Death() if self._all_is_told:
                    self._put_down_the_ring()
                case Death():
                    if not self._start_again(event):
                        return self._give_up(event)
                case SupervisorEvent.STARTED:
                    self._order_drain()
                case SupervisorEvent.STOP:
                    say("second signal: stopped at once")
                    return EXIT_FORCED
                case SupervisorEvent.TIMEOUT:
                    return None
        return EXIT_OK

    @property
    def _all_is_told(self) -> bool:
        """The front door leaves when its clients have everything, and the scheduler when the front
        door does."""
        both = (self._children[name] for name in ("tokenizer_proc", "scheduler_proc"))
        return any(one.left and one.process.wait(EXIT_GRACE) == EXIT_OK for one in both)

    def _put_down_the_ring(self) -> None:
        """Nobody needs it any more, and whoever died cannot tell the others to leave. The gateway
        may still be writing."""
        for child in self._children:
            if child.name != GATEWAY and not child.left:
                child.process.kill()

    def _speakers(self) -> list[ChildProcess]:
        """The processes that clients are connected to."""
        return [child for child in self._children if child.name in ("tokenizer_proc", GATEWAY)]


def fail(error: QuadrigaError, code: int) -> NoReturn:
    say(f"error: {error}")
    terminal.drop_unwritten()
    sys.exit(code)


def serve(arguments: list[str]) -> NoReturn:
    """Run `quadriga serve` with these flags."""
    main(arguments, "quadriga serve")


def main(arguments: list[str] | None = None, program: str = "launcher.py") -> NoReturn:
    parser = argparse.ArgumentParser(
        program,
        usage="%(prog)s [FLAGS]",
        description="Serve a language model in four processes.",
        allow_abbrev=False,
    )
    configuration.add_flags(parser)
    terminal.open_if_closed()
    namespace = parser.parse_args(arguments)
    try:
        config = configuration.from_namespace(namespace)
    except QuadrigaError as error:
        fail(error, EXIT_USAGE)
    needs = SERVING_NEEDS if config.http.no_http else SERVING_NEEDS + HTTP_NEEDS
    missing = [name for name in needs if find_spec(name) is None]
    if missing:
        say(f"error: {', '.join(missing)} not installed; pip install -e '.[serve]'")
        sys.exit(EXIT_START_FAILED)
    try:
        model = resolve_model(config.model, show_progress=True)
    except QuadrigaError as error:
        fail(error, EXIT_START_FAILED)
    except KeyboardInterrupt:
        sys.exit(EXIT_FORCED)
    for note in model.notes:
        say(note)
    allow_open_files(MAX_OPEN_FILES)
    try:
        code = Launcher(config, model).run()
    except QuadrigaError as error:
        fail(error, EXIT_START_FAILED)
    terminal.drop_unwritten()
    sys.exit(code)


if __name__ == "__main__":
    main()
