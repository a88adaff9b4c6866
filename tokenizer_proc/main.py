"""The tokenizer process: loads the tokenizer, opens the sockets, and runs the frontend."""

import asyncio
import gc
import logging
import os
import time
from pathlib import Path
from typing import NamedTuple

import uvloop

from quadriga.errors import ServerFailed
from quadriga.sampling.validation import find_unserved_tokens
from quadriga.server.model_aliases import FILE_NAME, AliasFile
from quadriga.server.model_list import read_models
from quadriga.server.models import model_impl, resolve
from quadriga.server.models.adapters.store import AdapterStore
from quadriga.server.models.formats.tokenizer import load_tokenizer
from quadriga.server.processes.child import Child, run_child
from quadriga.server.processes.control_channel import GATEWAY_GOES_ON, Command
from quadriga.server.processes.logs import RequestLogLevel
from quadriga.server.processes.machine import FileWatch, map_large_blocks
from quadriga.server.tracing.export import make_exporter
from quadriga.wire import client, curve, sockets
from quadriga.wire.async_sockets import AsyncPort, ConnectionWatch
from tokenizer_proc.deliver.traces import RingTraces
from tokenizer_proc.frontend import Frontend
from tokenizer_proc.info import find_fill_format, static_server_info
from tokenizer_proc.intake import grammar_validator, intake, overload, tenants
from tokenizer_proc.intake.adapters import Adapters
from tokenizer_proc.intake.pool import ForkServer, PreparePool
from tokenizer_proc.preparation.chat import ChatTemplate, token_marks
from tokenizer_proc.preparation.encode import Encoder
from tokenizer_proc.preparation.prepare import Preparer
from tokenizer_proc.preparation.templates.derive import ParserNames
from tokenizer_proc.replicas.links import ReplicaLinks
from tokenizer_proc.replicas.replicas import Replicas

# When the server ends, a client that takes no message for this time gets none of the others.
STALL_TIMEOUT_S = 3.0
REPLICA_COMMANDS = (
    Command.RESTARTED, Command.DIED, Command.LOST, Command.RECALL, Command.JOINED, Command.LEFT,
    Command.REPORT_LOAD,
)  # fmt: skip
# Time in which the sockets may send what they have taken.
FLUSH_TIMEOUT_S = 1.0


class Loaded(NamedTuple):
    """What is loaded before the process has threads or sockets, so that it can fork."""

    model: resolve.ModelFiles
    preparer: Preparer
    fork_server: ForkServer
    static_info: client.InfoValues


def main() -> None:
    """Run `python -m tokenizer_proc`, at a lower priority than the worker."""
    run_child("tokenizer_proc", _run, low_priority=True)


def _run(child: Child) -> None:
    map_large_blocks()
    loaded = _load(child)
    uvloop.run(serve(child, loaded))


def _load(child: Child) -> Loaded:
    began_at = time.monotonic()
    config = child.config
    model = resolve.resolve_model(config.model)
    tokenizer = load_tokenizer(model.tokenizer_dir)
    marks = token_marks(tokenizer, model.eos_token_ids)
    flags = config.frontend
    parsers = ParserNames.of_flags(flags.tool_call_parser, flags.reasoning_parser)
    chat = ChatTemplate(model.tokenizer_dir, model.chat_template, marks, parsers)
    num_ids = tokenizer.get_vocab_size(with_added_tokens=True)
    model_impl.check_tokenizer(model, num_ids)
    unserved = find_unserved_tokens(tokenizer, model.vocab_size)
    for note in filter(None, (unserved.note, *chat.notes)):
        logging.warning(note)
    encoder = Encoder(tokenizer, chat)
    preparer = Preparer(config.frontend, model, encoder, unserved)
    fork_server = ForkServer(preparer.prepare_frame)
    pids = {"launcher": os.getppid(), "tokenizer_proc": os.getpid()}
    child.phase("load tokenizer", time.monotonic() - began_at)
    fill_format = find_fill_format(tokenizer, model.tokenizer_dir, model.vocab_size)
    models = read_models(Path(child.models_file)) if child.models_file else ()
    info = static_server_info(
        config, model, chat.exists, chat.answer_format, fill_format, pids, models
    )
    return Loaded(model, preparer, fork_server, info)


async def serve(child: Child, loaded: Loaded) -> None:
    """Serve until everything is delivered after a stop, or the clients know of a failure."""
    args = child.config.frontend
    guard = curve.Guard(Path(args.curve_dir)) if args.curve_dir else None
    endpoint, prepare = child.public_endpoint, [guard.prepare] if guard else []
    file = sockets.SocketFile(endpoint) if endpoint.startswith(sockets.IPC) else None
    public = file.bind(*prepare) if file else sockets.bind_public(endpoint, *prepare)
    preparation = _start_preparation(child, loaded)
    links = ReplicaLinks(child)
    frontend = _make_frontend(child, loaded, preparation, guard, links.replicas)
    if guard:
        port = guard.port(public, frontend.on_public, frontend.clients.block)
    else:
        port = AsyncPort(public, frontend.on_public)
    frontend.open(port)
    links.open(frontend)
    watch = ConnectionWatch(public, frontend.clients.on_disconnect, on_accept=FileWatch().on_accept)
    child.ready(chat=loaded.static_info["chat"], only_task=loaded.model.only_task)
    gc.freeze()
    child.control.answer_in_loop()
    if not child.config.scheduler.journal:  # else clients wait for a server that resumes them
        child.control.fail_clients_at_launcher_death()
    asyncio.get_running_loop().add_reader(
        child.control.fileno(), _run_commands, child, frontend, links
    )
    await frontend.ended.wait()
    await frontend.clients.flush(STALL_TIMEOUT_S)
    preparation.close()
    await asyncio.to_thread(frontend.traces.close)
    watch.close()
    frontend.clients.close()
    links.close()
    port.close(FLUSH_TIMEOUT_S)
    if file:
        file.close()
    if guard:
        guard.close()


def _start_preparation(child: Child, loaded: Loaded) -> intake.RequestPreparation:
    pool = PreparePool(loaded.fork_server, child.config.frontend.tokenize_workers)
    pool.open()
    return intake.RequestPreparation(
        loaded.preparer, pool, grammar_validator.GrammarValidator(loaded.model)
    )


def _make_frontend(
    child: Child,
    loaded: Loaded,
    preparation: intake.RequestPreparation,
    keys: curve.Guard | None,
    replicas: Replicas,
) -> Frontend:
    key_names = None if keys is None else keys.key_names
    owners = tenants.RequestOwners(
        child.config.tenants, child.config.model, key_names, child.endpoints.run_dir
    )
    limits, traces = child.config.scheduler, child.config.traces
    model = child.config.model.shown_name
    max_queued = limits.max_queued_requests * child.config.replicas.num_slots
    guard = overload.OverloadGuard(max_queued, limits.max_requests_per_client)
    store = None
    if child.config.model.serves_adapters:
        store = AdapterStore.of_model(child.server_dir, child.of_model, child.config)
        store.load_modules()
    num_kept = max(2 * limits.max_loras, limits.num_loras_in_memory)
    moved = Path(child.models_file).with_name(FILE_NAME) if child.models_file else None
    return Frontend(
        preparation,
        guard,
        replicas,
        loaded.static_info,
        replaces=child.is_restart or limits.resume,
        logs_refusals=RequestLogLevel.of(child.config.launch).logs_all,
        owners=owners,
        traces=RingTraces(traces, make_exporter(traces, model), model),
        num_replicas=child.config.replicas.num_slots,
        aliases=AliasFile(moved) if moved else None,
        adapters=Adapters(store, replicas, num_kept=num_kept),
    )


def _run_commands(child: Child, frontend: Frontend, links: ReplicaLinks) -> None:
    for command, argument in child.control.read_commands():
        if command is Command.DRAIN:
            frontend.intake.drain(gateway_goes_on=argument == GATEWAY_GOES_ON)
        elif command is Command.ABORT:
            frontend.intake.abort_incoming(argument)
        elif command in REPLICA_COMMANDS:
            links.on_process(command, argument)
        elif command is Command.FAIL:
            frontend.clients.broadcast(ServerFailed(argument))
            frontend.ended.set()
