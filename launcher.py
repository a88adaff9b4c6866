"""Start the four processes and the web gateway, restart those that die, and stop them.

    python launcher.py [--model smollm2-135m] [--endpoint tcp://127.0.0.1:5555] …

The launcher does no work of its own and imports no torch. Each child holds one end of a socket
pair (quadriga/server/processes/control_channel.py): reports come up, commands go down, and its end
reports a death at once.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from quadriga import errors, programs
from quadriga.clock import Countdown
from quadriga.errors import ConfigError, QuadrigaError, ServerFailed
from quadriga.server.config import served_models
from quadriga.server.config.engine_args import CUDA_FRACTION, OTHER_FRACTION
from quadriga.server.config.parser import ServerParser, in_flags
from quadriga.server.config.served_models import ConfiguredModel, ModelSet
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.models.model_impl import find_served_model
from quadriga.server.models.resolve import ModelFiles
from quadriga.server.models.weights import weight_files
from quadriga.server.processes import first_screen, logs
from quadriga.server.processes.control_channel import (
    EXIT_CHILD_DIED,
    EXIT_FORCED,
    EXIT_OK,
    EXIT_START_FAILED,
    EXIT_USAGE,
    OwnerChannel,
)
from quadriga.server.processes.logs import JSON, say, set_up_logging
from quadriga.server.processes.machine import MAX_OPEN_FILES, allow_open_files, runs_on_gpu
from quadriga.server.processes.model_host import GIB, expected_bytes, with_preloads
from quadriga.server.processes.model_processes import ModelPlan
from quadriga.server.processes.server_processes import ServerDrain, ServerProcesses
from quadriga.server.processes.supervisor import Death, SupervisorEvent
from quadriga.server.tenants import check_key_file

STARTED_AT = time.monotonic()
SERVING_PACKAGES = (
    "torch", "numpy", "tokenizers", "safetensors", "gguf", "jinja2", "uvloop", "psutil", "msgpack",
)  # fmt: skip
HTTP_PACKAGES = ("aiohttp", "prometheus_client")


class Launcher:
    """One run of a server, from start to exit code.

    Args:
        shared: the flags of the server.
        models: what is to be served, and the files of each.
        owner: the program that started the server for itself, if one did.
    """

    def __init__(
        self,
        shared: ServerConfig,
        models: Sequence[tuple[ConfiguredModel, ModelFiles]],
        owner: OwnerChannel,
    ) -> None:
        self._model_seconds = time.monotonic() - STARTED_AT
        self._owner = owner
        self._config = shared
        self._quiet = self._config.launch.log_format == JSON or not logs.is_foreground()
        memory = shared.launch.model_memory
        budget = None if memory is None else int(memory * GIB)
        plans = [self._plan(model, files, len(models)) for model, files in models]
        plans = with_preloads(plans, [model.preload for model, _ in models], budget)
        shared_flags = _flags_of(shared, *models[0])
        self._processes = ServerProcesses(
            plans,
            None if shared.http.no_http else shared_flags,
            shared.launch,
            programs.command_of,
            budget,
        )

    def _plan(self, model: ConfiguredModel, files: ModelFiles, num_models: int) -> ModelPlan:
        """Return how a model is served.

        Args:
            model: the model.
            files: its files.
            num_models: number of models of the server.
        """
        config = model.config
        if num_models > 1 and config.worker.mem_fraction_static is None:
            whole = CUDA_FRACTION if runs_on_gpu(config.worker) else OTHER_FRACTION
            config = config.replace(mem_fraction_static=round(whole / num_models, 4))
        flags = _flags_of(config, model, files)
        if not (self._quiet or config.replicas.survives_loss or num_models > 1):
            flags.append("--has-status-line")
        return ModelPlan(
            model.name if num_models > 1 else "",
            config,
            flags,
            model.aliases,
            is_pinned=model.pin,
            idle_unload_s=model.idle_unload,
            num_bytes=expected_bytes(config.worker, _file_bytes(files)),
        )

    def run(self) -> int:
        """Start, serve until a signal or a death for good, stop; return the exit code."""
        try:
            self._processes.start_all()
            return self._wait_until_ready() or self._serve()
        finally:
            self._processes.clean_up()

    # --- start ------------------------------------------------------------------------------------

    def _wait_until_ready(self) -> int:
        """Return EXIT_OK once every process has reported that it serves."""
        timeout = Countdown(self._config.launch.start_timeout)
        line = first_screen.PhaseLine(shown=not self._quiet)
        while self._processes.is_starting:
            line.show(self._processes, time.monotonic())
            event = self._processes.next_event(timeout)
            match event:
                case Death():
                    if not self._processes.survives_start(event):
                        return self._fail_start(event.start_error, event.error_code)
                case SupervisorEvent.STOP:
                    if not self._owner.is_gone:
                        say("stopped while starting")
                    return EXIT_FORCED
                case SupervisorEvent.TIMEOUT:
                    return self._fail_start(
                        f"{', '.join(self._processes.not_ready)} not ready within"
                        f" {self._config.launch.start_timeout:g} s; raise --start-timeout"
                    )
        line.close()
        self._processes.host.begin_to_serve(self._config.launch.start_timeout)
        if self._owner:
            self._owner.report_ready(self._public_endpoint)
        else:
            self._announce()
        return EXIT_OK

    def _fail_start(self, message: str, code: str = ServerFailed.code) -> int:
        """Report why the server cannot start, and return the exit code."""
        report(errors.from_code(code, message), self._owner)
        return EXIT_START_FAILED

    @property
    def _public_endpoint(self) -> str:
        return self._processes.models[0].public_endpoint(self._processes.run_dir)

    def _announce(self) -> None:
        models, endpoint = self._processes.models, self._public_endpoint
        if self._config.launch.log_level == "debug":
            for text in first_screen.start_details(self._model_seconds, self._processes):
                say(text)
        seconds = time.monotonic() - STARTED_AT
        loaded = [(model, model.workers[0]) for model in models if model.workers]
        served = [
            (model.plan.config, model.workers[0].info if model.workers else {}) for model in models
        ]
        say(
            first_screen.ready_line(served, seconds, endpoint),
            **first_screen.ready_fields(served, seconds, endpoint),
        )
        for model, worker in loaded:
            say(first_screen.start_summary(model.plan.name, self._model_seconds, worker))
            if note := model.replicas.cores_note(worker.info):
                say(note)
        info = models[0].frontend.info
        has_chat, only_task = info.get("chat", True), info.get("only_task", "")
        for text in first_screen.usage_lines(self._config, has_chat, endpoint, only_task):
            say(text)

    # --- serve, and stop --------------------------------------------------------------------------

    def _serve(self) -> int:
        while True:
            event = self._processes.next_event(None)
            match event:
                case Death():
                    if not self._processes.survives(event):
                        self._processes.give_up(event)
                        return EXIT_CHILD_DIED
                case SupervisorEvent.STOP:
                    return self._stop()
                case SupervisorEvent.RELOAD:
                    say(f"reloading: {self._processes.reload_note}")
                    self._processes.begin_reload()
            self._processes.reload_next()

    def _stop(self) -> int:
        """Stop after a signal; return the exit code.

        Without its owner the server has no client any more, and nothing is worth finishing.
        """
        if self._owner.is_gone:
            return EXIT_FORCED
        timeout_s, has_journal = (
            self._config.launch.shutdown_timeout,
            self._config.scheduler.journal,
        )
        return ServerDrain(self._processes, timeout_s, bool(has_journal)).run()


def _flags_of(config: ServerConfig, model: ConfiguredModel, files: ModelFiles) -> list[str]:
    """Return command line flags with the name of a model and the location of its files."""
    location = {**files.location_flags, "served_model_name": model.name}
    return config.replace(**location).to_argv()


def _file_bytes(files: ModelFiles) -> int:
    """Return the size of a model's weights on disk; 0 for random ones."""
    weights = weight_files(files.weights) if files.weights else []
    return sum(path.stat().st_size for path in weights)


def report(error: QuadrigaError, owner: OwnerChannel) -> None:
    """Report an error to the owner, who raises it, or else print it."""
    if owner:
        owner.report_failure(error.code, str(error))
    else:
        say(f"error: {in_flags(str(error))}", event="failed", code=error.code)


def fail(error: QuadrigaError, code: int, owner: OwnerChannel) -> NoReturn:
    """Report an error and exit with the code."""
    report(error, owner)
    logs.drop_unwritten()
    sys.exit(code)


def check_packages(no_http: bool) -> None:
    """Raise ConfigError where a package is not installed that some process imports."""
    packages = SERVING_PACKAGES if no_http else SERVING_PACKAGES + HTTP_PACKAGES
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not installed; {programs.install_command('serve')}"
        )


def find_models(
    model_set: ModelSet, shows_progress: bool
) -> list[tuple[ConfiguredModel, ModelFiles]]:
    """Return the models with their files.

    A model of --models-dir that cannot be served is left out, with the reason in the log.

    Args:
        model_set: what is to be served.
        shows_progress: print how far a download is.

    Raises:
        QuadrigaError: a model that was named cannot be served, or no model can.
    """
    files: list[ModelFiles] = []
    left_out: list[ConfiguredModel] = []
    for model in model_set.models:
        try:
            files.append(find_served_model(model.config, shows_progress))
        except QuadrigaError as error:
            if not model.is_found or len(left_out) + 1 == len(model_set.models):
                raise
            left_out.append(model)
            say(f"model {model.name} is left out: {error}", event="model_left_out")
    models = served_models.without(left_out, model_set) if left_out else model_set.models
    return list(zip(models, files, strict=True))


def serve(arguments: list[str]) -> NoReturn:
    """Run the command `quadriga serve`."""
    main(arguments, "quadriga serve")


def main(arguments: list[str] | None = None, program: str = "launcher.py") -> NoReturn:
    """Parse the flags, find the model, and run a server."""
    logs.open_if_closed()
    parser = ServerParser(program)
    parser.add_argument("--owner-fd", type=int, help=argparse.SUPPRESS)
    namespace = parser.parse_flags(arguments)
    owner = OwnerChannel(namespace.owner_fd)
    try:
        config, models = served_models.from_namespace(namespace)
        keys = config.tenants.keys
        if keys and (warning := check_key_file(Path(keys))):
            say(warning)
    except QuadrigaError as error:
        fail(error, EXIT_USAGE, owner)
    if config.launch.log_format == JSON:
        set_up_logging("launcher", "info", JSON)
    try:
        check_packages(config.http.no_http)
        shows_progress = config.launch.log_format != JSON
        found = find_models(ModelSet(config, models), shows_progress)
        for _, files in found:
            for note in files.notes:
                say(note)
        allow_open_files(MAX_OPEN_FILES)
        code = Launcher(config, found, owner).run()
    except QuadrigaError as error:
        fail(error, EXIT_START_FAILED, owner)
    except KeyboardInterrupt:
        sys.exit(EXIT_FORCED)
    logs.drop_unwritten()
    sys.exit(code)


if __name__ == "__main__":
    main()
