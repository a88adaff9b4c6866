"""AsyncClient: one connection to a server, any number of requests at once.

session.py keeps the connection and what is open on it.
"""

import asyncio
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, overload

import msgspec

from quadriga.client.decisions import (
    AskedQuestion,
    Decision,
    LabelEncoder,
    LabelRequests,
    Question,
    check_num_questions,
    decisions_of,
)
from quadriga.client.receipts import Receipt, hash_ids, hash_params, hash_vector
from quadriga.client.request_handle import AcceptedSink, RequestHandle, Sink
from quadriga.client.session import ServerSession
from quadriga.client.types import (
    NO_CHAT_OPTIONS,
    Chat,
    Completion,
    ForkSource,
    KeptRequest,
    Prompt,
    RankedText,
    RenderedPrompt,
    StreamChunk,
    TextEmbedding,
    TextLabels,
    TextScore,
    check_is_one_prompt,
    check_options,
    checked_params,
    is_list_of_prompts,
    is_time_limit,
    pairs_of,
    params_of_each,
    wire_prompt,
)
from quadriga.client.types import RequestOptions as RequestOptions
from quadriga.errors import InvalidRequest
from quadriga.sampling.params import SamplingParams
from quadriga.sampling.pooling import CLASSIFY, PROBABILITIES, SCORE, Pooling
from quadriga.wire.client import (
    PROTOCOL_VERSION,
    ChatOptions,
    Detokenize,
    FlushCache,
    Generate,
    GetInfo,
    GetProgress,
    GetTraces,
    Info,
    ProgressAnswer,
    ReleaseCache,
    RequestProgress,
    Text,
    Tokenize,
    Tokens,
    Traces,
)
from quadriga.wire.live import LiveMessage
from quadriga.wire.packing import unpack_ids
from quadriga.wire.trace import RequestTrace

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Texts of one `embed` that are in the server at one time; the next ones follow as they end.
MAX_TEXTS_AT_ONCE = 256
# The names of labels are waited for as long as it takes to restart a process.
LABELS_TIMEOUT_S = 600.0
DEFAULT_POOLING = Pooling()
DEFAULT_SCORING, DEFAULT_CLASSIFYING = Pooling(SCORE), Pooling(CLASSIFY, activation=PROBABILITIES)


class AsyncClient(ServerSession):
    """One connection to a server; any number of requests at once. Use it on one event loop.

    A connection that breaks is re-established, and open requests continue where they were.

        async with AsyncClient() as client:
            print((await client.generate("The capital of France is")).text)

    Args:
        endpoint: the server's public socket, the `zmq` address of its start line. Several with
            commas between them are tried in turn, a second each, until one answers.
        connect_timeout: seconds until ServerUnreachable if no server answers.
        reconnect_timeout: seconds until ServerUnreachable if the server stops answering.
        curve_dir: directory of this client's keys, if the server requires keys.
        identity: address of this client at the server; None: a random one.
        model: name of the model to use, of several that the server at `endpoint` serves, or of an
            adapter of its first one; "": the first one.

    Raises:
        ConfigError: the endpoint is the address of a web server.
    """

    # --- requests ---------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        stream: bool = True,
        sink: Sink | None = None,
        on_accepted: AcceptedSink | None = None,
        tenant: str = "",
        kept: KeptRequest | None = None,
        **options: "Unpack[RequestOptions]",
    ) -> RequestHandle:
        """Send a request, now or as soon as the server is back. The client must be connected.

        Args:
            prompt: a text, token ids, or a chat.
            params: sampling and stopping.
            stream: send chunks as tokens come; False: one chunk at the end.
            sink: called on the event loop with each chunk or the error; the handle must then not
                be iterated.
            on_accepted: called on the event loop, once and before the first chunk, when the prompt
                is tokenized, with its number of tokens and the end of a chat's text.
            tenant: owner of the request; the server ignores it but from its own gateway.
            kept: the request goes on without this client, and may be sent again by another one
                with the same identity. It needs a seed.
            **options: timeout, priority, … (see RequestOptions).

                handle = client.submit("Once upon a time")
                async for chunk in handle:
                    print(chunk.text, end="", flush=True)

        Raises:
            TypeError: a keyword has another name; the message names similar ones.
            InvalidRequest: the prompt or params have a wrong type, or the message exceeds the frame
                limit.
            QuadrigaError: the connection is lost, for this reason.
        """
        known = RequestOptions.__annotations__.keys() - {"receipt"}
        check_options("submit", options, known)
        began_at = _now()
        return self._submit(
            prompt, params, began_at, stream, sink, options, on_accepted, tenant, kept
        )

    def _submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        began_at: float,
        stream: bool,
        sink: Sink | None,
        options: RequestOptions,
        on_accepted: AcceptedSink | None = None,
        tenant: str = "",
        kept: KeptRequest | None = None,
    ) -> RequestHandle:
        """Send a request whose timeout counts from `began_at`, in the event loop's time."""
        self._connection.check()
        request_id = self._next_id()
        if kept is not None:
            request_id = kept.request_id
        wire = wire_prompt(prompt)
        sent: Any = {name: value for name, value in options.items() if name != "receipt"}
        if self._adapter:
            sent.setdefault("adapter", self._adapter)
        message = Generate(
            PROTOCOL_VERSION,
            request_id,
            wire.prompt,
            checked_params(params).with_seed(),
            stream,
            prompt_token_ids=wire.token_ids,
            acknowledge=on_accepted is not None,
            tenant=tenant,
            keep_s=None if kept is None else kept.keep_s,
            **sent,
        )
        # The handle records the time of submission.
        handle = RequestHandle(message, self._inflight.drop, sink, on_accepted)
        if kept is not None and kept.is_resent:
            handle.follow_predecessor()
        return self._begin(handle, began_at)

    def _next_id(self) -> str:
        """Return the id of the next request."""
        self._counter += 1
        return f"{self._identity.hex}-{self._counter - 1}"

    def _begin(self, handle: RequestHandle, began_at: float) -> RequestHandle:
        """Send a request whose timeout counts from `began_at`."""
        self._inflight.add(handle)
        if is_time_limit(timeout := handle.message.timeout):
            handle.expire_at(began_at + timeout)
        return handle

    @overload  # a str is a sequence of str, too, but the first overload wins
    async def generate(  # type: ignore[overload-overlap]
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: "Unpack[RequestOptions]",
    ) -> Completion: ...
    @overload
    async def generate(
        self,
        prompt: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: "Unpack[RequestOptions]",
    ) -> list[Completion]: ...
    async def generate(
        self, prompt: Any, params: Any = None, **options: "Unpack[RequestOptions]"
    ) -> Completion | list[Completion]:
        """Return the completion of a prompt, or those of a list of prompts in the same order.

        Every prompt of a list is run to its end before the first error is raised.

            completion = await client.generate("The capital of France is")
            first, second = await client.generate(["One,", "Two,"], SamplingParams(seed=1))

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
        check_options("generate", options, RequestOptions.__annotations__)
        began_at = _now()
        single = not is_list_of_prompts(prompt)
        prompts: list[Any] = [prompt] if single else list(prompt)
        each_params = params_of_each(params, len(prompts))
        await self._connect_within(options.get("timeout"))
        handles: list[RequestHandle] = []
        try:
            for item, of_item in zip(prompts, each_params, strict=True):
                handles.append(self._submit(item, of_item, began_at, False, None, options))
            results = await asyncio.gather(
                *(handle.completion() for handle in handles), return_exceptions=True
            )
        finally:
            for handle in handles:
                handle.abort()
        completions = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            completions.append(result)
        if options.get("receipt"):
            for handle, completion in zip(handles, completions, strict=True):
                await self.add_receipts(handle.message, [completion, *completion.others])
        return completions[0] if single else completions

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: "Unpack[RequestOptions]",
    ) -> AsyncIterator[StreamChunk]:
        """Yield the chunks of a completion as they come. Leaving the loop early aborts the request.

            async for chunk in client.stream("Once upon a time"):
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
        check_options("stream", options, RequestOptions.__annotations__)
        check_is_one_prompt(prompt, "stream")
        began_at = _now()
        await self._connect_within(options.get("timeout"))
        handle = self._submit(prompt, params, began_at, True, None, options)
        try:
            async for chunk in handle:
                if chunk.completion is not None and options.get("receipt"):
                    await self.add_receipts(handle.message, [chunk.completion])
                yield chunk
        finally:
            handle.abort()

    async def fork(
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

            story = await client.generate("Once upon a time")
            best_of = await client.fork(story, 20, n=8)
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
        check_options("fork", options, RequestOptions.__annotations__)
        began_at = _now()
        await self._connect_within(options.get("timeout"))
        last = answer.completion if isinstance(answer, StreamChunk) else None
        source = answer.source if last is None else last.source
        if source is None:
            raise InvalidRequest(
                "answer was not made by a client: send its request again", "answer"
            )
        sent: Any = {name: value for name, value in options.items() if name != "receipt"}
        message = msgspec.structs.replace(
            source.request,
            request_id=self._next_id(),
            params=_forked(source, at_token, params, n),
            stream=False,
            acknowledge=False,
            keep_s=None,
            **sent,
        )
        handle = RequestHandle(message, self._inflight.drop, None, None)
        self._begin(handle, began_at)
        try:
            completion = await handle.completion()
        finally:
            handle.abort()
        if options.get("receipt"):
            await self.add_receipts(message, [completion, *completion.others])
        return completion

    @overload  # a str is a sequence of str, too, but the first overload wins
    async def embed(  # type: ignore[overload-overlap]
        self, prompt: str, pooling: Pooling = DEFAULT_POOLING, **options: "Unpack[RequestOptions]"
    ) -> TextEmbedding: ...
    @overload
    async def embed(
        self,
        prompt: Sequence[Prompt],
        pooling: Pooling = DEFAULT_POOLING,
        **options: "Unpack[RequestOptions]",
    ) -> list[TextEmbedding]: ...
    async def embed(
        self, prompt: Any, pooling: Pooling = DEFAULT_POOLING, **options: "Unpack[RequestOptions]"
    ) -> TextEmbedding | list[TextEmbedding]:
        """Return the vector of a text, or those of a list of texts in the same order.

        At most MAX_TEXTS_AT_ONCE of them are in the server at one time. The first error ends all.

            embedding = await client.embed("The capital of France is Paris.")
            first, second = await client.embed(["One.", "Two."], Pooling(dimensions=128))

        Args:
            prompt: a text or token ids, or a list of them. `[]` gives `[]`.
            pooling: what vectors are asked for.
            **options: timeout, priority, truncate_prompt, … (see RequestOptions), for each text.

        Raises:
            InvalidRequest: the server gives no vectors, or a text or `pooling` is wrong.
            QuadrigaError: as `generate`.
        """
        check_options("embed", options, RequestOptions.__annotations__)
        is_single = isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], int))
        prompts: list[Any] = [prompt] if is_single else list(prompt)
        vectors = await self._vectors([(item, pooling) for item in prompts], options)
        embeddings = [TextEmbedding(*each) for each in vectors]
        return embeddings[0] if is_single else embeddings

    async def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        pooling: Pooling = DEFAULT_SCORING,
        **options: "Unpack[RequestOptions]",
    ) -> list[TextScore]:
        """Return the scores of pairs of texts, of a model that ranks, in their order.

            (score,) = await client.score("Who has horses?", "Four horses draw the chariot.")

        Args:
            text_1: the first texts, such as queries; a single one goes with every second text.
            text_2: the second texts, such as documents.
            pooling: of the method "score": activation, instruction, and what texts are cut to.
            **options: timeout, priority, truncate_prompt, … (see RequestOptions), for each pair.

        Raises:
            InvalidRequest: the model ranks no texts, or a text or `pooling` is wrong.
            QuadrigaError: as `generate`.
        """
        check_options("score", options, RequestOptions.__annotations__)
        pairs = pairs_of(text_1, text_2)
        asked: list[tuple[Prompt, Pooling]] = [
            (first, msgspec.structs.replace(pooling, text_pair=second)) for first, second in pairs
        ]
        return [TextScore(vector[0], num) for vector, num in await self._vectors(asked, options)]

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        pooling: Pooling = DEFAULT_SCORING,
        **options: "Unpack[RequestOptions]",
    ) -> list[RankedText]:
        """Return documents with their scores, those that match a query best first.

            best, *_ = await client.rerank("Who has horses?", ["A fox.", "Four horses."])

        Args:
            query: the first text of each pair.
            documents: the second ones; at most MAX_TEXTS_AT_ONCE are in the server at one time.
            top_n: return so many; None: all.
            pooling: as in `score`.
            **options: timeout, priority, truncate_prompt, … (see RequestOptions), for each pair.

        Raises:
            InvalidRequest: the model ranks no texts, or a text or `pooling` is wrong.
            QuadrigaError: as `generate`.
        """
        check_options("rerank", options, RequestOptions.__annotations__)
        scores = await self.score(query, documents, pooling, **options)
        ranked = [
            RankedText(number, score.score, text)
            for number, (score, text) in enumerate(zip(scores, documents, strict=True))
        ]
        return sorted(ranked, key=lambda each: -each.score)[:top_n]

    @overload  # a str is a sequence of str, too, but the first overload wins
    async def classify(  # type: ignore[overload-overlap]
        self,
        prompt: str,
        pooling: Pooling = DEFAULT_CLASSIFYING,
        **options: "Unpack[RequestOptions]",
    ) -> TextLabels: ...
    @overload
    async def classify(
        self,
        prompt: Sequence[str],
        pooling: Pooling = DEFAULT_CLASSIFYING,
        **options: "Unpack[RequestOptions]",
    ) -> list[TextLabels]: ...
    async def classify(
        self,
        prompt: str | Sequence[str],
        pooling: Pooling = DEFAULT_CLASSIFYING,
        **options: "Unpack[RequestOptions]",
    ) -> TextLabels | list[TextLabels]:
        """Return the labels of a text, or those of a list of texts in the same order.

            labels = await client.classify("What a day!")
            print(labels.label, labels.probs[labels.label])

        Args:
            prompt: a text, or a list of texts. `[]` gives `[]`.
            pooling: of the method "classify": activation.
            **options: timeout, priority, truncate_prompt, … (see RequestOptions), for each text.

        Raises:
            InvalidRequest: the model has no labels, or a text or `pooling` is wrong.
            QuadrigaError: as `generate`.
        """
        check_options("classify", options, RequestOptions.__annotations__)
        texts = [prompt] if isinstance(prompt, str) else list(prompt)
        # Asked for first: a server that stops answers nothing behind the last vector.
        asking = asyncio.ensure_future(self.info(LABELS_TIMEOUT_S))
        asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            vectors = await self._vectors([(text, pooling) for text in texts], options)
            if not vectors:
                return []
            labels = (await asking)["scores"]["labels"]
        finally:
            asking.cancel()
        found = [
            TextLabels(max(probs, key=probs.__getitem__), probs, num_tokens)
            for vector, num_tokens in vectors
            if (probs := dict(zip(labels, vector, strict=True)))
        ]
        return found[0] if isinstance(prompt, str) else found

    async def decide(
        self,
        state: str | Chat,
        questions: Sequence[Question | str],
        **options: "Unpack[RequestOptions]",
    ) -> list[Decision]:
        """Return the probabilities of the possible answers to questions about a state, in order.

            place, about = await client.decide(
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
        check_options("decide", options, RequestOptions.__annotations__)
        check_num_questions(len(questions))
        typed = [Question(each) if isinstance(each, str) else each for each in questions]
        read = [
            AskedQuestion.of(each, f"questions[{number}].labels")
            for number, each in enumerate(typed)
        ]
        chat: Chat = [{"role": "user", "content": state}] if isinstance(state, str) else state
        requests = await LabelEncoder(self, await self.info()).encode(chat, read)
        prompts = [
            prompt
            for each in requests
            if isinstance(each, LabelRequests)
            for prompt in each.prompts
        ]
        return decisions_of(requests, await self._completions(prompts, options))

    async def _vectors(
        self, asked: Sequence[tuple[Prompt, Pooling]], options: RequestOptions
    ) -> "list[tuple[array[float], int]]":
        """Return the vectors of prompts with their numbers of tokens, in order."""
        vectors = []
        for completion in await self._completions(asked, options):
            assert completion.vector is not None
            vectors.append((completion.vector, completion.usage.prompt_tokens))
        return vectors

    async def _completions(
        self, asked: Sequence[tuple[Prompt, Pooling]], options: RequestOptions
    ) -> list[Completion]:
        """Return the completions of prompts, which have their vectors, in order."""
        began_at = _now()
        await self._connect_within(options.get("timeout"))
        turns = asyncio.Semaphore(MAX_TEXTS_AT_ONCE)

        async def answer(
            number: int, item: Prompt, pooling: Pooling
        ) -> tuple[Generate, Completion]:
            params = SamplingParams(pooling=pooling)
            async with turns:
                handle = self._submit(item, params, began_at, False, None, options)
                try:
                    return handle.message, await handle.completion()
                except InvalidRequest as error:
                    raise error.of_text(f"text {number}") if len(asked) > 1 else error from None
                finally:
                    handle.abort()

        tasks = [asyncio.ensure_future(answer(n, *each)) for n, each in enumerate(asked)]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        if options.get("receipt"):
            info = await self.info()
            for message, completion in answers:
                await self.add_receipts(message, [completion], info)
        return [completion for _, completion in answers]

    async def abort(self, request_id: str = "") -> None:
        """Abort a request of this client, or all of them if the id is empty.

        They end with the finish reason "abort" and the text that they have.

            await client.abort(chunk.request_id)

        Args:
            request_id: `request_id` of a chunk; an unknown id is ignored.

        Raises:
            ServerUnreachable: no server answers at the endpoint, or the connection was lost.
        """
        await self.connect()
        self._inflight.abort(request_id)

    # --- questions --------------------------------------------------------------------------------

    async def info(self, timeout: float = 10.0) -> dict[str, Any]:
        """Return gauges and counters of the server, collected from all of its processes.

            num_running = (await client.info())["running"]

        Args:
            timeout: seconds until DeadlineExceeded, connecting included.

        Returns:
            Values by name; docs/protocol.md lists them.

        Raises:
            DeadlineExceeded: no answer within the timeout.
            ServerUnreachable: no server answers at the endpoint, or the connection was lost.
        """
        info: Info = await self._ask(lambda name: GetInfo(PROTOCOL_VERSION, name), timeout)
        return info.values

    async def flush_cache(self, timeout: float = 10.0) -> int:
        """Drop the cached prefixes that no request uses.

            num_pages = await client.flush_cache()

        Args:
            timeout: seconds until DeadlineExceeded, connecting included.

        Returns:
            The number of pages that this freed.

        Raises:
            DeadlineExceeded: no answer within the timeout.
            ServerUnreachable: no server answers at the endpoint, or the connection was lost.
        """
        info: Info = await self._ask(lambda name: FlushCache(PROTOCOL_VERSION, name), timeout)
        pages = info.values["flushed_pages"]
        assert isinstance(pages, int)
        return pages

    async def release_cache(
        self, key: str | None = None, tenant: str = "", timeout: float = 10.0
    ) -> int:
        """Let go what requests have asked to keep in the prefix cache.

            hint = CacheHint("session-17", ttl_s=3600)
            completion = await client.generate(chat, cache=hint)
            num_prefixes = await client.release_cache("session-17")

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
        info: Info = await self._ask(
            lambda name: ReleaseCache(PROTOCOL_VERSION, name, key, tenant), timeout
        )
        num_pins = info.values["released_pins"]
        assert isinstance(num_pins, int)
        return num_pins

    async def progress(
        self, request_ids: list[str], timeout: float = 10.0
    ) -> list[RequestProgress]:
        """Return how far requests of this client are: queued, in prefill, or decoding.

            (progress,) = await client.progress([handle.request_id])

        Args:
            request_ids: `request_id` of handles or chunks, at most 64.
            timeout: seconds until DeadlineExceeded, connecting included.

        Returns:
            A value for each request, in order; its state is UNKNOWN for one that has ended.

        Raises:
            InvalidRequest: there are too many ids.
            QueueFull: too many questions are not answered yet.
            DeadlineExceeded: no answer within the timeout.
            ServerUnreachable: no server answers at the endpoint, or the connection was lost.
        """
        answer: ProgressAnswer = await self._ask(
            lambda name: GetProgress(PROTOCOL_VERSION, name, request_ids), timeout
        )
        return answer.values

    async def traces(self, request_ids: list[str], timeout: float = 10.0) -> list[RequestTrace]:
        """Return the traces of requests of this client that have ended, as far as they are kept.

            (trace,) = await client.traces([completion.request_id])

        Args:
            request_ids: `request_id` of handles or completions, at most 64.
            timeout: seconds until DeadlineExceeded, connecting included.

        Returns:
            A trace for each choice of each request that was traced.

        Raises:
            InvalidRequest: there are too many ids.
            DeadlineExceeded: no answer within the timeout.
            ServerUnreachable: no server answers at the endpoint, or the connection was lost.
        """
        answer: Traces = await self._ask(
            lambda name: GetTraces(PROTOCOL_VERSION, name, request_ids), timeout
        )
        return answer.traces

    async def watch(self, replica: int = 0) -> AsyncGenerator[LiveMessage, None]:
        """Yield what the server does: a LiveStep for each step, a LiveServer each second.

        The server makes these messages only while a client watches. A caller that is too slow
        loses messages: the `number` of the next LiveStep has a gap then.

            async for message in client.watch():
                print(message)

        Args:
            replica: number of the replica whose steps are watched, of a server with --dp.

        Raises:
            InvalidRequest: this client may not see the requests of others, or there is no such
                replica.
            QueueFull: too many clients watch.
            ServerUnreachable: no server answers at the endpoint, or the connection was lost.
        """
        await self.connect()
        with self._live.iterator(replica) as iterator:
            while True:
                yield await iterator.next()

    async def tokenize(
        self, prompt: Prompt, chat: ChatOptions = NO_CHAT_OPTIONS, timeout: float = 60.0
    ) -> list[int]:
        """Return the token ids that `generate` would use for a text or a chat.

            ids = await client.tokenize("Hello, world")

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
        answer = await self._tokens("tokenize", prompt, chat, False, timeout)
        return unpack_ids(answer.token_ids).tolist()

    async def render(
        self, prompt: Prompt, chat: ChatOptions = NO_CHAT_OPTIONS, timeout: float = 60.0
    ) -> RenderedPrompt:
        """Return the text and the token ids that `generate` would use for a text or a chat.

            text, ids = await client.render([{"role": "user", "content": "Hello"}])

        Args:
            prompt: a text or a chat.
            chat: tools and variables of the chat template, if the prompt is a chat.
            timeout: seconds until DeadlineExceeded, connecting included.

        Raises:
            InvalidRequest: the prompt is neither a text nor a chat, or the model has no chat
                template, or the template refuses the chat.
            DeadlineExceeded: no answer within the timeout.
            ServerUnreachable: no server answers at the endpoint, or the connection was lost.
        """
        answer = await self._tokens("render", prompt, chat, True, timeout)
        return RenderedPrompt(answer.text, unpack_ids(answer.token_ids).tolist())

    async def add_receipts(
        self,
        message: Generate,
        completions: Sequence[Completion],
        info: dict[str, Any] | None = None,
    ) -> None:
        """Set the receipt of each choice of a request that has ended.

            await client.add_receipts(handle.message, [await handle.completion()])

        Args:
            message: the request.
            completions: its choices.
            info: of the server, asked for after the answer; None: the server is asked.

        Raises:
            DeadlineExceeded: no answer within the timeouts of `info` and `tokenize`.
            ServerUnreachable: no server answers at the endpoint, or the connection was lost.
        """
        info = info or await self.info()
        if message.prompt_token_ids is not None:
            ids = unpack_ids(message.prompt_token_ids).tolist()
        else:
            ids = await self.tokenize(msgspec.to_builtins(message.prompt), message.chat)
        for completion in completions:
            has_vector = completion.vector is not None
            completion.receipt = Receipt(
                request_id=completion.request_id,
                model=info["model"],
                fingerprint=info["model_details"]["digest"],
                kernels=info["kernels"] or "",
                seed=0 if has_vector else (message.params.seed or 0) + completion.index,
                params=hash_params(message.params),
                # The last ones, where the prompt was truncated.
                prompt=hash_ids(ids[-completion.usage.prompt_tokens :]),
                tokens=hash_ids(completion.token_ids),
                vector="" if completion.vector is None else hash_vector(completion.vector),
                adapter=completion.adapter,
            )

    async def _tokens(
        self, call: str, prompt: Prompt, chat: ChatOptions, with_text: bool, timeout: float
    ) -> Tokens:
        check_is_one_prompt(prompt, call)
        wire = wire_prompt(prompt)
        if wire.token_ids is not None:
            raise InvalidRequest("prompt is a list of token ids already", "prompt")
        answer: Tokens = await self._ask(
            lambda name: Tokenize(PROTOCOL_VERSION, name, wire.prompt, chat, with_text), timeout
        )
        return answer

    async def detokenize(
        self, token_ids: list[int], skip_special_tokens: bool = True, timeout: float = 60.0
    ) -> str:
        """Return the text of token ids.

            text = await client.detokenize([504, 3575, 282])

        Args:
            token_ids: ids of the model's vocabulary.
            skip_special_tokens: leave special tokens out of the text.
            timeout: seconds until DeadlineExceeded, connecting included.

        Raises:
            InvalidRequest: it is no list of ids, or an id is not in the vocabulary.
            DeadlineExceeded: no answer within the timeout.
            ServerUnreachable: no server answers at the endpoint, or the connection was lost.
        """
        packed = wire_prompt(token_ids).token_ids
        if packed is None:
            raise InvalidRequest("token_ids must be a list of integers", "token_ids")
        answer: Text = await self._ask(
            lambda name: Detokenize(PROTOCOL_VERSION, name, packed, skip_special_tokens), timeout
        )
        return answer.text


def _forked(
    source: ForkSource, at_token: int | None, params: SamplingParams | None, n: int | None
) -> SamplingParams:
    """Return the parameters of a fork. Raise InvalidRequest."""
    count = len(source.token_ids)
    if at_token is None:
        ends_with_stop = count > 0 and source.token_ids[-1] == source.matched_stop
        at_token = count - ends_with_stop
    if not 0 <= at_token <= count:
        raise InvalidRequest(
            f"at_token is {at_token}: the answer has {count} tokens, so that it is 0 to {count}",
            "at_token",
        )
    fields: dict[str, Any] = {"first_token_ids": source.token_ids[:at_token]}
    if params is None:
        params = source.request.params
        fields |= {"seed": None, "n": 1}
    if n is not None:
        fields["n"] = n
    return msgspec.structs.replace(checked_params(params), **fields).with_seed()


def _now() -> float:
    return asyncio.get_running_loop().time()
