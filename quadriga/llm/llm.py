"""LLM: generate text in a program, without a server that is started by hand."""

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from quadriga.client.arguments import check_is_chat, check_options
from quadriga.client.async_client import RequestOptions
from quadriga.client.sync_client import Client
from quadriga.client.types import Chat, Completion, Prompt, StreamChunk
from quadriga.config.model_args import BUILTIN_MODEL
from quadriga.errors import RequestAborted, ServerFailed
from quadriga.llm.owned_server import OwnedServer
from quadriga.llm.server_flags import ServerFlags, server_argv
from quadriga.sampling.params import SamplingParams

if TYPE_CHECKING:
    from typing_extensions import Unpack

# The server is ready, but a machine under load may take a while to answer.
CONNECT_TIMEOUT_S = 30.0


class LLM:
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

    @overload  # a str is a sequence of str, too, but the first overload wins
    def generate(  # type: ignore[overload-overlap]
        self,
        prompts: Prompt,
        params: SamplingParams | None = None,
        **options: "Unpack[RequestOptions]",
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: "Unpack[RequestOptions]",
    ) -> list[Completion]: ...
    def generate(
        self, prompts: Any, params: Any = None, **options: "Unpack[RequestOptions]"
    ) -> Completion | list[Completion]:
        """Return the completion of a prompt, or those of a list of prompts in the same order.

        Prompts of a list are batched. All of them run to their end before the first error is
        raised.

            llm.generate("The capital of France is", SamplingParams(temperature=0)).text
            [completion.text for completion in llm.generate(["One,", "Two,"])]

        Args:
            prompts: a text, token ids or a chat, or a list of them. `[]` gives `[]`.
            params: sampling and stopping; a list gives each prompt its own.
            **options: timeout, priority, … (see RequestOptions), for each prompt of a list.

        Raises:
            TypeError: a keyword or an argument has another name or type.
            InvalidRequest: the prompt or a parameter is wrong; PromptTooLong is one of them.
            DeadlineExceeded: `timeout` or `queue_timeout` is over.
            RequestAborted: the LLM was closed.
            QuadrigaError: the server failed; `quadriga.errors` lists the subclasses.
        """
        result: Completion | list[Completion] = self.client.generate(prompts, params, **options)
        return result

    @overload
    def chat(
        self,
        messages: Chat,
        params: SamplingParams | None = None,
        **options: "Unpack[RequestOptions]",
    ) -> Completion: ...
    @overload
    def chat(
        self,
        messages: Sequence[Chat],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: "Unpack[RequestOptions]",
    ) -> list[Completion]: ...
    def chat(
        self, messages: Any, params: Any = None, **options: "Unpack[RequestOptions]"
    ) -> Completion | list[Completion]:
        """Return the answer to a chat, or those to a list of chats in the same order.

            llm.chat([{"role": "user", "content": "Name the capital of France."}]).text

        Args:
            messages: the turns, each a map of role and content; or a list of such chats.
            params: sampling and stopping; a list gives each chat its own.
            **options: timeout, priority, … (see RequestOptions); `chat=ChatOptions(tools=…)` for
                tools and variables of the chat template.

        Raises:
            InvalidRequest: it is no chat, or the model has no chat template.
            QuadrigaError: as `generate`.
        """
        check_options("chat", options, RequestOptions.__annotations__)
        check_is_chat(messages)
        answers: Completion | list[Completion] = self.client.generate(messages, params, **options)
        return answers

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: "Unpack[RequestOptions]",
    ) -> Iterator[StreamChunk]:
        """Yield the chunks of a completion as they come. Leaving the loop early aborts the request.

            for chunk in llm.stream("Once upon a time"):
                print(chunk.text, end="", flush=True)

        Args:
            prompt: a text, token ids or a chat.
            params: sampling and stopping.
            **options: timeout, priority, … (see RequestOptions).

        Returns:
            An iterator; the last chunk of each choice has the whole `completion`.

        Raises:
            QuadrigaError: as `generate`; the iterator raises it.
        """
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
