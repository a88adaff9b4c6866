"""LLM: generate text in a program, without a server that is started by hand.

ServerFlags lists the keywords, OwnedServer runs the launcher, and LLM is a client of it. The other
end of the channel to the launcher is OwnerChannel in quadriga/server/processes/control_channel.py.
"""

import json
import os
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, overload

from quadriga import errors, keywords
from quadriga.client.async_client import (
    RequestOptions,
)
from quadriga.client.sync_client import Client, ClientCall, NumberCalls, T
from quadriga.client.types import (
    Chat,
    Completion,
    Prompt,
    StreamChunk,
    check_is_chat,
    check_options,
)
from quadriga.errors import ConfigError, QuadrigaError, RequestAborted, ServerFailed
from quadriga.programs import command_of
from quadriga.sampling.params import SamplingParams
from quadriga.server.config.engine_args import BUILTIN_MODEL
from quadriga.wire.client import PRIVATE_ENDPOINT

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LoRARequest(NamedTuple):
    """The adapter that answers a request of an LLM.

    Attributes:
        lora_name: its name, which a path belongs to from the first request on.
        lora_int_id: ignored: an adapter is known by its content.
        lora_path: a PEFT directory or a GGUF file; "": it is loaded already.
        pinned: it keeps its place in the worker from now on; False: it stays as it is.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""
    pinned: bool = False


def load_adapter(info: dict[str, Any], request: LoRARequest) -> str:
    """Load the adapter of a request into a server of this machine, if that is to be done.

    Args:
        info: of the server.
        request: names the adapter.

    Returns:
        The name of the adapter.

    Raises:
        ConfigError: the server was started without adapters.
        InvalidRequest: the files are no adapter of the model, the name has other ones, or too many
            adapters are pinned.
    """
    if not request.lora_path:
        return request.lora_name
    directory = info.get("adapter_directory")
    if not directory:
        raise ConfigError("lora_request has a path: make the LLM with enable_lora=True")
    # Imported here, as most programs load no adapter.
    from quadriga.server.config.engine_args import ModelArgs
    from quadriga.server.models.adapters.store import AdapterStore

    args = ModelArgs(enable_lora=True, max_lora_rank=int(info["max_lora_rank"]))
    max_loras = int(info["adapters"]["max"])
    store = AdapterStore(Path(directory), Path(info["adapter_copies"]), args, max_loras)
    store.load(request.lora_name, request.lora_path, pinned=True if request.pinned else None)
    return request.lora_name


class ServerFlags(TypedDict, total=False):
    """Flags of the server, without those of the endpoint, the web gateway and several models.

    docs/configuration.md describes them: `max_batch_size=8` is `--max-batch-size 8`. A test
    compares this list with the server's flags.
    """

    # Model
    revision: str
    tokenizer: str
    chat_template: str
    load_format: Literal["auto", "dummy"]
    model_impl: Literal["auto", "native", "transformers"]
    trust_remote_code: bool
    context_length: int | None
    enable_lora: bool
    lora_modules: str
    lora_dir: str
    max_lora_rank: int
    # Frontend, text to token ids (tokenizer_proc)
    tokenize_workers: int
    default_max_tokens: int
    allow_auto_truncate: bool
    sampling_defaults: Literal["model", "openai"]
    tool_call_parser: str
    reasoning_parser: str
    pooling: Literal["last", "mean", "weighted-mean", "cls"]
    queue_timeout: float | None
    request_timeout: float | None
    # Scheduling (scheduler_proc)
    max_batch_size: int
    prefill_max_batch_size: int | None
    prefill_max_tokens: int
    chunked_prefill_size: int | None
    itl_target: float | None
    max_running_requests: int
    max_queued_requests: int
    max_requests_per_client: int | None
    batch_mode: Literal["prefill-first", "mixed", "decode-first", "alternate"]
    batching: Literal["continuous", "static"]
    schedule_policy: Literal["fcfs", "lpm", "dfs-weight", "pack", "priority", "shortest"]
    priority_preemption_threshold: int | None
    fair_clients: bool
    batch_concurrency_beside: int
    schedule_conservativeness: float
    kv_events_config: str
    disable_radix_cache: bool
    cache_pin_fraction: float
    speculative_method: Literal["none", "ngram", "auto", "self"]
    num_speculative_tokens: int
    max_loras: int
    max_cpu_loras: int | None
    journal: str
    no_journal: bool
    resume: bool
    # Computation (worker_proc)
    device: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    page_size: int
    max_total_tokens: int | None
    mem_fraction_static: float | None
    attention_backend: Literal["auto", "native", "triton", "flashinfer", "torch"]
    disable_cuda_graph: bool
    enable_deterministic_inference: bool
    quantization: Literal["auto", "none", "int8", "int4", "gguf"]
    kv_cache_dtype: Literal["auto", "int8", "fp8"]
    kv_cache_dir: str
    kv_cache_dir_size: float
    kv_offloading_size: float
    tp: int
    worker_threads: int | None
    numa_node: str
    # Detokenization, token ids to text (detok_proc)
    stream_interval: int
    # Tenants (tokenizer_proc, scheduler_proc, http_proc)
    keys: str
    tenants_by: Literal["none", "address"]
    usage_log: str
    # Replicas (launcher.py, tokenizer_proc)
    dp: int
    load_balance_method: Literal["cache-aware", "least-loaded", "round-robin"]
    prefill_replicas: int | Literal["auto"]
    role_resources: str
    cluster: Literal["none", "ray"]
    replica_cpus: float
    nnodes: int | None
    min_replicas: int | None
    max_replicas: int | None
    target_ongoing_requests: int
    scale_down_after: float
    # Traces (tokenizer_proc, http_proc)
    otlp_endpoint: str
    trace_sampling_ratio: float | None
    keep_traces: Literal["sampled", "all"]
    # Start, stop and logging (launcher.py)
    start_timeout: float
    shutdown_timeout: float
    max_restarts: int
    watchdog_timeout: float
    log_level: Literal["debug", "info", "warning", "error"]
    log_format: Literal["text", "json"]
    log_requests: bool
    log_slow_requests: float | None
    log_stats_interval: float


# Values that differ from the command line's: the program is the only client.
OWNED_SERVER = {"endpoint": PRIVATE_ENDPOINT, "no_http": True, "log_level": "warning"}


def server_argv(model: str | Path, flags: Mapping[str, Any]) -> list[str]:
    """Return the command line flags of a server that only this program uses.

    Raises:
        TypeError: there is no such flag; the message names similar ones.
        ConfigError: a value cannot work.
    """
    from quadriga.server.config.flags import (
        checked_value,
        flag_fields,
        flag_name,
        missing_flag_advice,
    )
    from quadriga.server.config.server_config import ServerConfig

    for name in flags.keys() - ServerFlags.__annotations__.keys():
        if advice := missing_flag_advice(flag_name(name)):
            raise TypeError(f"LLM() has no keyword {name!r}: {advice}")
    keywords.check_keywords("LLM", flags, ServerFlags.__annotations__)
    fields = {field.name: field for field in flag_fields(*ServerConfig().groups())}
    texts = {
        name: str(value) if isinstance(value, Path) else value for name, value in flags.items()
    }
    values = {name: checked_value(name, value, fields[name]) for name, value in texts.items()}
    config = ServerConfig().replace(**OWNED_SERVER | values, model=str(model))
    config.validate()
    return config.to_argv()


# Seconds in which the launcher kills its processes and removes the run directory.
STOP_TIMEOUT_S = 20.0
EXIT_TIMEOUT_S = 5.0

_running: "weakref.WeakSet[OwnedServer]" = weakref.WeakSet()


class OwnedServer:
    """A launcher with a private endpoint, which stops when this program ends or closes it.

    The two share a socket pair. The kernel closes the program's end even after SIGKILL. The server
    is in a session of its own, so that Ctrl-C reaches the program only.

    Args:
        flags: command line flags of the server.
    """

    def __init__(self, flags: list[str]) -> None:
        self._owner_pid = os.getpid()
        self._is_closed = False
        self._channel, theirs = socket.socketpair()
        _running.add(self)
        with theirs:
            self._process = subprocess.Popen(
                [*command_of("launcher"), "--owner-fd", str(theirs.fileno()), *flags],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id of the launcher."""
        return self._process.pid

    def wait_until_ready(self) -> str:
        """Wait until the server answers, and return its endpoint.

        Raises:
            QuadrigaError: the server could not start; the class and the message are the server's.
        """
        with self._channel.makefile("r", encoding="utf-8") as reports:
            line = reports.readline()
        if not line:
            raise self._early_end()
        report = json.loads(line)
        if report["report"] == "failed":
            raise errors.from_code(report["code"], report["message"])
        endpoint: str = report["endpoint"]
        return endpoint

    def wait_for_end(self) -> str:
        """Wait until the server ends, and return how it ended; "" if this program closed it."""
        with suppress(OSError):  # the channel was closed before
            self._channel.recv(1)
        return "" if self._is_closed else self._end()

    def _end(self) -> str:
        try:
            code = self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "closed its channel"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"

    def _early_end(self) -> QuadrigaError:
        return ServerFailed(
            f"the server {self._end()} while it started; its output on stderr may say why"
        )

    def close(self) -> None:
        """Stop the server and wait for its end; a fork of this program only forgets it."""
        if self._is_closed:
            return
        self._is_closed = True
        if os.getpid() != self._owner_pid:
            self._channel.close()
            return
        with self._channel, suppress(OSError):  # the launcher may have exited
            self._channel.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the other processes exit when the launcher does
            self._process.wait()


def _close_in_fork() -> None:
    """Close the channels in a fork: it would otherwise keep the servers running."""
    for server in list(_running):
        server.close()


os.register_at_fork(after_in_child=_close_in_fork)


# The server is ready, but a machine under load may take a while to answer.
CONNECT_TIMEOUT_S = 30.0


class LLM(NumberCalls):
    """A model, served by processes that this program starts for itself and that end with it.

    The server has a private endpoint and no web gateway, so that any number of LLMs can run side by
    side. Its warnings appear on stderr. Methods may be called from any thread, also while an event
    loop runs, as in a notebook. A fork of the program cannot use the LLM: make one there.

        with LLM("smollm2-135m", max_batch_size=8) as llm:
            first, second = llm.generate(["One,", "Two,"], SamplingParams(max_tokens=16))

    Args:
        model: Hub id, directory, .gguf file, gpt2 and its sizes, or a built-in name.
        **flags: flags of the server: `dtype="float32"` is `--dtype float32`.

    Attributes:
        client: the client of the server, for tokenize, detokenize, info and abort.

    Raises:
        TypeError: there is no such flag; the message names similar ones.
        ConfigError: a flag cannot work.
        ModelError: the model cannot be found, fetched, read or run.
        ServerFailed: the server could not start for another reason.
    """

    def __init__(self, model: str | Path = BUILTIN_MODEL, **flags: "Unpack[ServerFlags]") -> None:
        self.model = str(model)
        self._server = OwnedServer(server_argv(model, flags))
        try:
            self.endpoint = self._server.wait_until_ready()
            self.client = Client(self.endpoint, CONNECT_TIMEOUT_S)
        except BaseException:
            self._server.close()
            raise
        self._loaded: set[LoRARequest] = set()
        watch = threading.Thread(target=_watch, args=(self.client, self._server), daemon=True)
        watch.start()
        # Called at the end of the program, too, unless the LLM was closed before.
        self._close = weakref.finalize(self, _close, self.client, self._server)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"pid {self._server.pid}" if self._close.alive else "closed"
        return f"LLM({self.model!r}, {state})"

    def close(self) -> None:
        """Abort all requests and stop the server. Later calls of a method raise RequestAborted."""
        self._close()

    def _run(self, work: ClientCall[T]) -> T:
        return self.client._run(work)

    def _with_adapter(
        self, options: RequestOptions, lora_request: LoRARequest | None
    ) -> RequestOptions:
        """Return options with the adapter of a LoRARequest, which is loaded first."""
        if lora_request is None:
            return options
        if lora_request not in self._loaded:
            load_adapter(self.client.info(), lora_request)
            self._loaded.add(lora_request)
        return {**options, "adapter": lora_request.lora_name}

    @overload  # a str is a sequence of str, too, but the first overload wins
    def generate(  # type: ignore[overload-overlap]
        self,
        prompts: Prompt,
        params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        **options: "Unpack[RequestOptions]",
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequest | None = None,
        **options: "Unpack[RequestOptions]",
    ) -> list[Completion]: ...
    def generate(
        self,
        prompts: Any,
        params: Any = None,
        lora_request: LoRARequest | None = None,
        **options: "Unpack[RequestOptions]",
    ) -> Completion | list[Completion]:
        """Return the completion of a prompt, or those of a list of prompts in the same order.

        Prompts of a list are batched. All of them run to their end before the first error is
        raised.

            llm.generate("The capital of France is", SamplingParams(temperature=0)).text
            [completion.text for completion in llm.generate(["One,", "Two,"])]

        Args:
            prompts: a text, token ids or a chat, or a list of them. `[]` gives `[]`.
            params: sampling and stopping; a list gives each prompt its own.
            lora_request: the adapter that answers; it is loaded from its path at the first call.
            **options: timeout, priority, … (see RequestOptions), for each prompt of a list.

        Raises:
            TypeError: a keyword or an argument has another name or type.
            InvalidRequest: the prompt or a parameter is wrong; PromptTooLong is one of them.
            DeadlineExceeded: `timeout` or `queue_timeout` is over.
            RequestAborted: the LLM was closed.
            QuadrigaError: the server failed; `quadriga.errors` lists the subclasses.
        """
        options = self._with_adapter(options, lora_request)
        result: Completion | list[Completion] = self.client.generate(prompts, params, **options)
        return result

    @overload
    def chat(
        self,
        messages: Chat,
        params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        **options: "Unpack[RequestOptions]",
    ) -> Completion: ...
    @overload
    def chat(
        self,
        messages: Sequence[Chat],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequest | None = None,
        **options: "Unpack[RequestOptions]",
    ) -> list[Completion]: ...
    def chat(
        self,
        messages: Any,
        params: Any = None,
        lora_request: LoRARequest | None = None,
        **options: "Unpack[RequestOptions]",
    ) -> Completion | list[Completion]:
        """Return the answer to a chat, or those to a list of chats in the same order.

            llm.chat([{"role": "user", "content": "Name the capital of France."}]).text

        Args:
            messages: the turns, each a map of role and content; or a list of such chats.
            params: sampling and stopping; a list gives each chat its own.
            lora_request: as in `generate`.
            **options: timeout, priority, … (see RequestOptions); `chat=ChatOptions(tools=…)` for
                tools and variables of the chat template.

        Raises:
            InvalidRequest: it is no chat, or the model has no chat template.
            QuadrigaError: as `generate`.
        """
        check_options("chat", options, RequestOptions.__annotations__)
        check_is_chat(messages)
        options = self._with_adapter(options, lora_request)
        answers: Completion | list[Completion] = self.client.generate(messages, params, **options)
        return answers

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        **options: "Unpack[RequestOptions]",
    ) -> Iterator[StreamChunk]:
        """Yield the chunks of a completion as they come. Leaving the loop early aborts the request.

            for chunk in llm.stream("Once upon a time"):
                print(chunk.text, end="", flush=True)

        Args:
            prompt: a text, token ids or a chat.
            params: sampling and stopping.
            lora_request: as in `generate`.
            **options: timeout, priority, … (see RequestOptions).

        Returns:
            An iterator; the last chunk of each choice has the whole `completion`.

        Raises:
            QuadrigaError: as `generate`; the iterator raises it.
        """
        options = self._with_adapter(options, lora_request)
        return self.client.stream(prompt, params, **options)


def _watch(client: Client, server: OwnedServer) -> None:
    """Fail the calls when the launcher ends, also where no other process could notify them."""
    end = server.wait_for_end()
    if end:
        with suppress(RequestAborted):  # the client was closed meanwhile
            client.give_up(ServerFailed(f"the server of this LLM {end}; make another LLM"))


def _close(client: Client, server: OwnedServer) -> None:
    """Stop the server at once if the program is interrupted meanwhile."""
    try:
        client.close()
    finally:
        server.close()
