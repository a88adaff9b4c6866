"""Client: AsyncClient for programs without an event loop.

LoopThread runs the event loop in a thread of its own; Client passes every call to it. NumberCalls
has what Client and LLM share.
"""

import asyncio
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, overload

from quadriga.client.async_client import (
    DEFAULT_CLASSIFYING,
    DEFAULT_POOLING,
    DEFAULT_SCORING,
    AsyncClient,
    RequestOptions,
)
from quadriga.client.decisions import Decision, Question
from quadriga.client.types import (
    NO_CHAT_OPTIONS,
    Chat,
    Completion,
    Prompt,
    RankedText,
    StreamChunk,
    TextEmbedding,
    TextLabels,
    TextScore,
)
from quadriga.errors import QuadrigaError, RequestAborted, RequestFailed
from quadriga.sampling.params import SamplingParams
from quadriga.sampling.pooling import Pooling
from quadriga.wire.client import DEFAULT_ENDPOINT, ChatOptions
from quadriga.wire.live import LiveMessage

if TYPE_CHECKING:
    from typing_extensions import Unpack


# An event loop in a thread of its own, for programs without one.
#
# A KeyboardInterrupt may occur between any two bytecodes of the waiting thread. So the loop never
# waits for a lock that such a thread may hold: results come back through a SimpleQueue, whose
# `put` needs none, unlike the condition of a concurrent.futures.Future. anyio's blocking portal,
# which uses these futures, leaves tasks behind or hangs under the Ctrl-C test of
# test_loop_thread.py.

T = TypeVar("T")
# Tasks have this time to end by themselves when the loop stops, before they are cancelled.
STOP_GRACE_S = 1.0


class LoopThread:
    """Runs coroutines and async iterators for other threads, which wait for the results.

    An exception in the waiting thread, such as Ctrl-C, cancels the job that it waits for.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._jobs: set[_Job[Any]] = set()
        self._process_id = os.getpid()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine and return its result. Raise RequestAborted if the loop ends first."""
        results: SimpleQueue[_Job[T]] = SimpleQueue()
        job = _Job(work, results.put)
        try:
            self._start(job)
            return results.get().outcome()
        finally:
            self._abandon(job)

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """Yield the items of an async iterator, which runs ahead of its reader and ends with it."""
        received: SimpleQueue[T | _Job[None]] = SimpleQueue()

        async def pump() -> None:
            async for item in items:
                received.put(item)

        job = _Job(pump, received.put)
        try:
            self._start(job)
            yield from _items_of(received)
        finally:
            self._abandon(job)

    def end(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a last coroutine, end all others, and join the thread.

        Concurrent calls wait for the end; later calls do nothing.
        """
        if self._loop.is_closed() or self._is_forked:
            return
        # A call of another thread may have ended the loop meanwhile.
        with suppress(RequestAborted):
            self.run(last)
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop)
        self._thread.join()

    def _stop(self) -> None:
        """Stop the loop once: a second stop would interrupt what `_main` runs after the first."""
        if not self._is_stopping:
            self._is_stopping = True
            self._loop.stop()

    @property
    def _is_forked(self) -> bool:
        """Whether this process is a fork, which has a copy of the loop but not its thread."""
        return self._process_id != os.getpid()

    def _start(self, job: "_Job[Any]") -> None:
        if self._is_forked:
            raise RequestFailed(
                "the client was made before this process was forked: make one in this process"
            )
        self._jobs.add(
            job
        )  # before the call: `_main` ends the jobs in this set when the loop closes
        try:
            self._loop.call_soon_threadsafe(job.begin)
        except RuntimeError:  # the loop is closed
            job.end()

    def _abandon(self, job: "_Job[Any]") -> None:
        self._jobs.discard(job)
        if not job.is_done and not self._is_forked:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(job.cancel)

    def _main(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(_drain(asyncio.all_tasks(self._loop)))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()
        for job in self._jobs.copy():
            job.end()


def _items_of(received: "SimpleQueue[T | _Job[None]]") -> Iterator[T]:
    """Yield what is received until the job's end.

    The loop is not in the `try` of `iterate`: Ctrl-C at the jump of a loop leaves a `try` without
    its `finally` in Python 3.13.0.
    """
    while not isinstance(item := received.get(), _Job):
        yield item
    item.outcome()


class _Job(Generic[T]):
    """A coroutine that another thread waits for.

    Args:
        work: makes the coroutine; called on the loop.
        on_end: called with the job when the coroutine has ended or could not begin.
    """

    def __init__(
        self, work: Callable[[], Coroutine[Any, Any, T]], on_end: "Callable[[_Job[T]], None]"
    ) -> None:
        self.is_done = False
        self._work = work
        self._on_end = on_end
        # The task is referenced by its own thread only: Python loses an interrupt that occurs in
        # asyncio's code for the deletion of a task.
        self._task: asyncio.Task[None] | None = None
        self._error: BaseException | None = RequestAborted("the client was closed")

    def begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            self._result = await self._work()
            self._error = None
        except Exception as error:
            self._error = error
        finally:
            self._task = None
            self.end()

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def end(self) -> None:
        if not self.is_done:
            self.is_done = True
            self._on_end(self)

    def outcome(self) -> T:
        """Return the result, or raise the error; RequestAborted if the client was closed."""
        if self._error is not None:
            raise self._error
        return self._result


async def _drain(tasks: set[asyncio.Task[Any]]) -> None:
    """Wait for tasks to end, and cancel those that do not end in time."""
    if not tasks:
        return
    _, pending = await asyncio.wait(tasks, timeout=STOP_GRACE_S)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)


# Makes a call of an AsyncClient, whose result is a T.
ClientCall: TypeAlias = Callable[[AsyncClient], Coroutine[Any, Any, T]]


class NumberCalls(ABC):
    """The calls of Client and LLM whose answers are numbers: vectors, scores and probabilities.

    In the examples `client` is one of both.
    """

    @abstractmethod
    def _run(self, work: ClientCall[T]) -> T:
        """Return the result of a call of an AsyncClient, or raise its error."""

    @overload  # a str is a sequence of str, too, but the first overload wins
    def embed(  # type: ignore[overload-overlap]
        self, prompt: str, pooling: Pooling = DEFAULT_POOLING, **options: "Unpack[RequestOptions]"
    ) -> TextEmbedding: ...
    @overload
    def embed(
        self,
        prompt: Sequence[Prompt],
        pooling: Pooling = DEFAULT_POOLING,
        **options: "Unpack[RequestOptions]",
    ) -> list[TextEmbedding]: ...
    def embed(
        self, prompt: Any, pooling: Pooling = DEFAULT_POOLING, **options: "Unpack[RequestOptions]"
    ) -> TextEmbedding | list[TextEmbedding]:
        """Return the vector of a text, or those of a list of texts in the same order.

            embedding = client.embed("The capital of France is Paris.")
            first, second = client.embed(["One.", "Two."], Pooling(dimensions=128))

        Args:
            prompt: a text or token ids, or a list of them. `[]` gives `[]`.
            pooling: what vectors are asked for.
            **options: timeout, priority, truncate_prompt, … (see RequestOptions), for each text.

        Raises:
            InvalidRequest: the server gives no vectors, or a text or `pooling` is wrong.
            QuadrigaError: as `generate`.
        """
        result: TextEmbedding | list[TextEmbedding] = self._run(
            lambda client: client.embed(prompt, pooling, **options)
        )
        return result

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        pooling: Pooling = DEFAULT_SCORING,
        **options: "Unpack[RequestOptions]",
    ) -> list[TextScore]:
        """Return the scores of pairs of texts, of a model that ranks, in their order.

            (score,) = client.score("Who has horses?", "Four horses draw the chariot.")

        Args:
            text_1: the first texts, such as queries; a single one goes with every second text.
            text_2: the second texts, such as documents.
            pooling: of the method "score": activation, instruction, and what texts are cut to.
            **options: timeout, priority, truncate_prompt, … (see RequestOptions), for each pair.

        Raises:
            InvalidRequest: the model ranks no texts, or a text or `pooling` is wrong.
            QuadrigaError: as `generate`.
        """
        return self._run(lambda client: client.score(text_1, text_2, pooling, **options))

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        pooling: Pooling = DEFAULT_SCORING,
        **options: "Unpack[RequestOptions]",
    ) -> list[RankedText]:
        """Return documents with their scores, those that match a query best first.

            best, *_ = client.rerank("Who has horses?", ["A fox.", "Four horses."])

        Args:
            query: the first text of each pair.
            documents: the second ones.
            top_n: return so many; None: all.
            pooling: as in `score`.
            **options: timeout, priority, truncate_prompt, … (see RequestOptions), for each pair.

        Raises:
            InvalidRequest: the model ranks no texts, or a text or `pooling` is wrong.
            QuadrigaError: as `generate`.
        """
        return self._run(lambda client: client.rerank(query, documents, top_n, pooling, **options))

    @overload  # a str is a sequence of str, too, but the first overload wins
    def classify(  # type: ignore[overload-overlap]
        self,
        prompt: str,
        pooling: Pooling = DEFAULT_CLASSIFYING,
        **options: "Unpack[RequestOptions]",
    ) -> TextLabels: ...
    @overload
    def classify(
        self,
        prompt: Sequence[str],
        pooling: Pooling = DEFAULT_CLASSIFYING,
        **options: "Unpack[RequestOptions]",
    ) -> list[TextLabels]: ...
    def classify(
        self,
        prompt: Any,
        pooling: Pooling = DEFAULT_CLASSIFYING,
        **options: "Unpack[RequestOptions]",
    ) -> TextLabels | list[TextLabels]:
        """Return the labels of a text, or those of a list of texts in the same order.

            labels = client.classify("What a day!")
            print(labels.label, labels.probs[labels.label])

        Args:
            prompt: a text, or a list of texts. `[]` gives `[]`.
            pooling: of the method "classify": activation.
            **options: timeout, priority, truncate_prompt, … (see RequestOptions), for each text.

        Raises:
            InvalidRequest: the model has no labels, or a text or `pooling` is wrong.
            QuadrigaError: as `generate`.
        """
        result: TextLabels | list[TextLabels] = self._run(
            lambda client: client.classify(prompt, pooling, **options)
        )
        return result

    def decide(
        self,
        state: str | Chat,
        questions: Sequence[Question | str],
        **options: "Unpack[RequestOptions]",
    ) -> list[Decision]:
        """Return the probabilities of the possible answers to questions about a state, in order.

            place, about = client.decide(
                "Paris lies on the Seine.",
                [Question("Which country?", ["France", "Germany"]), "It is about a city."],
            )
            print(place.label, place.confidence, about.probability)

        Args:
            state: a text, or a chat. It is computed once.
            questions: 1 to 400; a text is a statement that is true or not. Of those whose prompts
                are too long each is refused alone, as long as others have an answer.
            **options: timeout, priority, cache_salt, receipt, … (see RequestOptions), for each
                prompt.

        Raises:
            InvalidRequest: a question has too few, too many, empty or equal labels, all questions
                are refused, or the model has no chat template.
            QuadrigaError: as `generate`.
        """
        return self._run(lambda client: client.decide(state, questions, **options))


class Client(NumberCalls):
    """One connection to a server, for programs without an event loop. Call it from any thread.

    A connection that breaks is re-established, and open requests continue where they were. It is
    made by the first call, or by `with`.

        with Client() as client:
            print(client.generate("The capital of France is").text)

    Args:
        endpoint: the server's public socket, the `zmq` address of its start line. Several with
            commas between them are tried in turn, a second each, until one answers.
        connect_timeout: seconds until ServerUnreachable if no server answers.
        reconnect_timeout: seconds until ServerUnreachable if the server stops answering.
        curve_dir: directory of this client's keys, if the server requires keys.
        model: as of AsyncClient.

    Raises:
        ConfigError: the endpoint is the address of a web server.
    """

    def __init__(
        self,
        endpoint: str = DEFAULT_ENDPOINT,
        connect_timeout: float = 5.0,
        reconnect_timeout: float = 30.0,
        curve_dir: str | Path | None = None,
        model: str = "",
    ) -> None:
        self._async = AsyncClient(
            endpoint, connect_timeout, reconnect_timeout, curve_dir, model=model
        )
        self._loop = LoopThread("quadriga-client")

    def __enter__(self) -> "Client":
        try:
            self._loop.run(self._async.connect)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Abort all requests and disconnect: every open and later call raises RequestAborted.

        client.close()
        """
        self._loop.end(self._async.close)

    def give_up(self, error: QuadrigaError) -> None:
        """Fail every open and later call: the caller knows that the server has ended.

        A reason that the server has given itself is kept.

            client.give_up(ServerFailed("the machine of the server was shut down"))

        Args:
            error: what the calls raise.
        """
        self._loop.run(lambda: self._async.give_up(error))

    def _run(self, work: ClientCall[T]) -> T:
        return self._loop.run(lambda: work(self._async))

    @overload  # a str is a sequence of str, too, but the first overload wins
    def generate(  # type: ignore[overload-overlap]
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: "Unpack[RequestOptions]",
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: "Unpack[RequestOptions]",
    ) -> list[Completion]: ...
    def generate(
        self, prompt: Any, params: Any = None, **options: "Unpack[RequestOptions]"
    ) -> Completion | list[Completion]:
        """Return the completion of a prompt, or those of a list of prompts in the same order.

        Every prompt of a list is run to its end before the first error is raised.

            completion = client.generate("The capital of France is")
            first, second = client.generate(["One,", "Two,"], SamplingParams(seed=1))

        Args:
            prompt: a text, token ids or a chat (a list of {"role", "content"} maps), or a list of
                them. `[]` gives `[]`.
            params: sampling and stopping; a list gives each prompt its own.
            **options: timeout, priority, … (see RequestOptions), for each prompt of a list.

        Returns:
            The completion, which has the other choices in `others`; a list for a list of prompts.

        Raises:
            TypeError: a keyword has another name; the message names similar ones.
            InvalidRequest: the prompt or a parameter is wrong; PromptTooLong is one of them.
            QueueFull: the server accepts no further request now; `retry_after` has the seconds.
            DeadlineExceeded: `timeout` or `queue_timeout` is over.
            RequestAborted: the client was closed, or `abort` was called.
            ServerUnreachable: no server answers at the endpoint, or the connection was lost.
            QuadrigaError: the server failed; `quadriga.errors` lists the subclasses.
        """
        result: Completion | list[Completion] = self._loop.run(
            lambda: self._async.generate(prompt, params, **options)
        )
        return result

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: "Unpack[RequestOptions]",
    ) -> Iterator[StreamChunk]:
        """Yield the chunks of a completion as they come. Leaving the loop early aborts the request.

            for chunk in client.stream("Once upon a time"):
                print(chunk.text, end="", flush=True)

        Args:
            prompt: a text, token ids or a chat (a list of {"role", "content"} maps).
            params: sampling and stopping.
            **options: timeout, priority, … (see RequestOptions).

        Returns:
            An iterator; the last chunk of each choice has the whole `completion`.

        Raises:
            InvalidRequest: the prompt is a list of prompts, or empty, or a parameter is wrong.
            QuadrigaError: as `generate`; the iterator raises it.
        """
        return self._loop.iterate(self._async.stream(prompt, params, **options))

    def fork(
        self,
        answer: Completion | StreamChunk,
        at_token: int | None = None,
        params: SamplingParams | None = None,
        n: int | None = None,
        **options: "Unpack[RequestOptions]",
    ) -> Completion:
        """Answer a request again from one of the tokens of its answer, which the server has cached.

        The new answers begin with the first `at_token` tokens of the old one, which are part of
        their text and tokens, and go on as an answer that has sampled them.

            story = client.generate("Once upon a time")
            best_of = client.fork(story, 20, n=8)
            for branch in [best_of, *best_of.others]:
                print(branch.text)

        Args:
            answer: a completion, or a chunk of a stream, of which the tokens count that have
                arrived.
            at_token: number of tokens that are kept; None: all, but a stop token at the end.
            params: those of the new answers; None: those of the request, with another seed.
            n: number of new answers; None: as params say, else 1.
            **options: timeout, priority, … (see RequestOptions); those of the request otherwise.

        Returns:
            The first new answer, with the `others`.

        Raises:
            TypeError: a keyword has another name; the message names similar ones.
            InvalidRequest: the answer has fewer tokens, or a parameter is wrong.
            QuadrigaError: as `generate`.
        """
        return self._loop.run(lambda: self._async.fork(answer, at_token, params, n, **options))

    def abort(self, request_id: str = "") -> None:
        """Abort a request of this client, or all of them if the id is empty.

        They end with the finish reason "abort" and the text that they have.

            client.abort(chunk.request_id)

        Args:
            request_id: `request_id` of a chunk; an unknown id is ignored.

        Raises:
            ServerUnreachable: no server answers at the endpoint, or the connection was lost.
        """
        self._loop.run(lambda: self._async.abort(request_id))

    def info(self, timeout: float = 10.0) -> dict[str, Any]:
        """Return gauges and counters of the server, collected from all of its processes.

            num_running = client.info()["running"]

        Args:
            timeout: seconds until DeadlineExceeded, connecting included.

        Returns:
            Values by name; docs/protocol.md lists them.

        Raises:
            DeadlineExceeded: no answer within the timeout.
            ServerUnreachable: no server answers at the endpoint, or the connection was lost.
        """
        return self._loop.run(lambda: self._async.info(timeout))

    def flush_cache(self, timeout: float = 10.0) -> int:
        """Drop the cached prefixes that no request uses.

            num_pages = client.flush_cache()

        Args:
            timeout: seconds until DeadlineExceeded, connecting included.

        Returns:
            The number of pages that this freed.

        Raises:
            DeadlineExceeded: no answer within the timeout.
            ServerUnreachable: no server answers at the endpoint, or the connection was lost.
        """
        return self._loop.run(lambda: self._async.flush_cache(timeout))

    def release_cache(self, key: str | None = None, tenant: str = "", timeout: float = 10.0) -> int:
        """Let go what requests have asked to keep in the prefix cache.

            hint = CacheHint("session-17", ttl_s=3600)
            completion = client.generate(chat, cache=hint)
            num_prefixes = client.release_cache("session-17")

        Args:
            key: key of their CacheHint; None: all of this client's tenant.
            tenant: owner of the requests; the server ignores it but from its own gateway.
            timeout: seconds until DeadlineExceeded, connecting included.

        Returns:
            The number of prefixes that were kept until now.

        Raises:
            DeadlineExceeded: no answer within the timeout.
            InvalidRequest: the key is too long.
            ServerUnreachable: no server answers at the endpoint, or the connection was lost.
        """
        return self._loop.run(lambda: self._async.release_cache(key, tenant, timeout))

    def watch(self, replica: int = 0) -> Iterator[LiveMessage]:
        """Yield what the server does: a LiveStep for each step, a LiveServer each second.

        A caller that is too slow loses messages: the `number` of the next LiveStep has a gap then.

            for message in client.watch():
                print(message)

        Args:
            replica: number of the replica whose steps are watched, of a server with --dp.

        Raises:
            QuadrigaError: as `AsyncClient.watch`.
        """
        messages = self._async.watch(replica)

        async def next_message() -> LiveMessage:
            return await anext(messages)

        try:
            while True:
                yield self._loop.run(next_message)
        finally:
            self._loop.run(messages.aclose)

    def tokenize(
        self, prompt: Prompt, chat: ChatOptions = NO_CHAT_OPTIONS, timeout: float = 60.0
    ) -> list[int]:
        """Return the token ids that `generate` would use for a text or a chat.

            ids = client.tokenize("Hello, world")

        Args:
            prompt: a text or a chat.
            chat: tools and variables of the chat template, if the prompt is a chat.
            timeout: seconds until DeadlineExceeded, connecting included.

        Raises:
            InvalidRequest: the prompt is neither a text nor a chat, or the model has no chat
                template.
            DeadlineExceeded: no answer within the timeout.
            ServerUnreachable: no server answers at the endpoint, or the connection was lost.
        """
        return self._loop.run(lambda: self._async.tokenize(prompt, chat, timeout))

    def detokenize(
        self, token_ids: list[int], skip_special_tokens: bool = True, timeout: float = 60.0
    ) -> str:
        """Return the text of token ids.

            text = client.detokenize([504, 3575, 282])

        Args:
            token_ids: ids of the model's vocabulary.
            skip_special_tokens: leave special tokens out of the text.
            timeout: seconds until DeadlineExceeded, connecting included.

        Raises:
            InvalidRequest: it is no list of ids, or an id is not in the vocabulary.
            DeadlineExceeded: no answer within the timeout.
            ServerUnreachable: no server answers at the endpoint, or the connection was lost.
        """
        return self._loop.run(
            lambda: self._async.detokenize(token_ids, skip_special_tokens, timeout)
        )
