"""Start the four processes and the web gateway, watch over them, stop them.

No torch here, and no work of its own.

    python launcher.py [--model smollm2-135m] [--endpoint tcp://127.0.0.1:5555] …

Each child holds one end of a socket pair (quadriga/process.py): its reports come up, orders go
down, and the end of it says at once that the other side is gone.
"""

import argparse
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from quadriga import config as configuration
from quadriga.child_process import EXIT_GRACE, ChildProcess
from quadriga.config import ServerConfig
from quadriga.errors import QuadrigaError
from quadriga.model_source import ModelFiles, resolve_model
from quadriga.process import (
    ABORT,
    DRAIN,
    EXIT_CHILD_DIED,
    EXIT_FORCED,
    EXIT_OK,
    EXIT_START_FAILED,
    EXIT_USAGE,
    FAIL,
)

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
)
HTTP_NEEDS = ("aiohttp", "prometheus_client")
PROCESSES = ("worker_proc", "scheduler_proc", "detok_proc", "tokenizer_proc")
GATEWAY = "http_proc"
FAREWELL_TIMEOUT = 1.5
"""Seconds that front door and gateway have to tell the clients that another process died."""
ABORT_TIMEOUT = 5.0
"""Seconds after --shutdown-timeout for the aborted requests to be answered."""


class Launcher:
    """One run of a server, from start to exit code."""

    def __init__(self, config: ServerConfig, model: ModelFiles) -> None:
        self._model_seconds = time.monotonic() - BEGAN
        self._config = config
        self._model = model
        self._run_dir = Path(tempfile.mkdtemp(prefix="quadriga-"))
        self._children: dict[str, ChildProcess] = {}
        self._selector = selectors.DefaultSelector()
        self._signals, self._signal_wakeup = socket.socketpair()
        self._signals.setblocking(False)
        self._signal_wakeup.setblocking(False)
        self._selector.register(self._signals, selectors.EVENT_READ)

    def run(self) -> int:
        """Start, serve until a signal or a death, stop. Returns the exit code."""
        signal.set_wakeup_fd(self._signal_wakeup.fileno())
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        try:
            for name in PROCESSES if self._config.http.no_http else (*PROCESSES, GATEWAY):
                self._children[name] = self._start(name)
            return self._wait_until_ready() or self._serve()
        finally:
            self._leave_nothing_behind()

    # --- start ------------------------------------------------------------------------------------

    def _start(self, name: str) -> ChildProcess:
        ours, theirs = socket.socketpair()
        location = {
            "model": self._model.location,
            "served_model_name": self._config.model.shown_name,
        }
        command = [sys.executable, "-m", name, "--run-dir", str(self._run_dir)]
        command += ["--lifeline-fd", str(theirs.fileno())]
        command += self._config.replace(**location).to_argv()
        path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        child = ChildProcess(name, process, ours)
        self._selector.register(ours, selectors.EVENT_READ, child)
        return child

    def _wait_until_ready(self) -> int:
        """EXIT_OK once every process has said that it can serve."""
        deadline = time.monotonic() + self._config.launch.start_timeout
        while not all(child.ready for child in self._children.values()):
            dead, stopped = self._next_event(deadline - time.monotonic())
            if dead:
                say(f"error: {dead.name} could not start: {dead.how_it_ended()}")
                return EXIT_START_FAILED
            if stopped:
                say("stopped while starting")
                return EXIT_FORCED
            if time.monotonic() >= deadline:
                slow = [c.name for c in self._children.values() if not c.ready]
                say(
                    f"error: {', '.join(slow)} not ready within"
                    f" {self._config.launch.start_timeout:g} s; raise --start-timeout"
                )
                return EXIT_START_FAILED
        self._announce()
        return EXIT_OK

    def _announce(self) -> None:
        facts = self._children["worker_proc"].ready or {}
        endpoint = self._config.front_door.endpoint
        say(f"  launcher: find model {self._model_seconds:.1f} s")
        for child in self._children.values():
            if child.phases:
                say(f"  {child.name}: {', '.join(child.phases)}")
        say(
            f"  KV pool {facts.get('tokens')} tokens · {facts.get('backend')} backend ·"
            f" {facts.get('threads')} worker threads"
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
            dead, stopped = self._next_event(None)
            if dead:
                return self._give_up(dead)
            if stopped:
                return self._drain()

    def _give_up(self, dead: ChildProcess) -> int:
        """A process died: tell the clients of front door and gateway, name it, and leave."""
        how = dead.how_it_ended()
        message = f"{dead.name} died ({how}); all open requests are lost"
        deadline = time.monotonic() + FAREWELL_TIMEOUT
        speakers = [child for child in self._speakers() if child is not dead]
        for child in speakers:
            child.order(FAIL, f"{message}; the server is stopping, start it again")
        for child in speakers:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
        say(f"error: {message}. Start the server again; its log above may say why.")
        return EXIT_CHILD_DIED

    def _drain(self) -> int:
        """Finish what runs, within --shutdown-timeout; then abort it; a second signal kills."""
        timeout = self._config.launch.shutdown_timeout
        say(f"stopping: open requests have {timeout:g} s; a second signal ends them now")
        for child in self._speakers():
            child.order(DRAIN)
        outcome = self._wait_for_exits(timeout)
        if outcome is None:
            say(f"{timeout:g} s are over: aborting what is left")
            reason = "the server stopped before this request had finished"
            self._children["scheduler_proc"].order(ABORT, reason)
            outcome = self._wait_for_exits(ABORT_TIMEOUT)
        if outcome is None:
            say("error: some process did not stop in time and is killed")
            return EXIT_FORCED
        if outcome == EXIT_OK:
            say("stopped")
        return outcome

    def _wait_for_exits(self, timeout: float) -> int | None:
        """The exit code once every child has left or something went wrong; None at the timeout."""
        deadline = time.monotonic() + timeout
        while any(child.lifeline.fileno() >= 0 for child in self._children.values()):
            dead, stopped = self._next_event(deadline - time.monotonic())
            if stopped:
                say("second signal: stopped at once")
                return EXIT_FORCED
            if dead and dead.process.wait(EXIT_GRACE) != 0:
                return self._give_up(dead)
            if time.monotonic() >= deadline:
                return None
        return EXIT_OK

    def _speakers(self) -> list[ChildProcess]:
        """The processes that clients are connected to."""
        return [self._children[n] for n in ("tokenizer_proc", GATEWAY) if n in self._children]

    # --- events -----------------------------------------------------------------------------------

    def _next_event(self, timeout: float | None) -> tuple[ChildProcess | None, bool]:
        """Wait for a child's end or a stop signal; (None, False) for a report or the timeout."""
        for key, _ in self._selector.select(None if timeout is None else max(0.0, timeout)):
            if key.data is None:
                self._signals.recv(4096)
                return None, True
            child: ChildProcess = key.data
            if not child.read_reports():
                self._selector.unregister(child.lifeline)
                child.lifeline.close()
                return child, False
        return None, False

    def _leave_nothing_behind(self) -> None:
        signal.set_wakeup_fd(-1)
        for child in self._children.values():
            if child.process.poll() is None:
                child.process.kill()
        for child in self._children.values():
            child.process.wait()
        shutil.rmtree(self._run_dir, ignore_errors=True)


def say(text: str) -> None:
    """A line for the person who runs the server."""
    print(text, file=sys.stderr, flush=True)


def fail(error: QuadrigaError, code: int) -> NoReturn:
    say(f"error: {error}")
    sys.exit(code)


def main(arguments: list[str] | None = None) -> NoReturn:
    parser = argparse.ArgumentParser(
        "launcher.py", description="Serve a language model in four processes.", allow_abbrev=False
    )
    configuration.add_flags(parser)
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
    sys.exit(Launcher(config, model).run())


if __name__ == "__main__":
    main()
