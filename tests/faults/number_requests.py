"""A load of requests whose answers are numbers, by the ZeroMQ socket and by HTTP.

Vectors, scores, labels and decisions, of a decoder, an encoder, a cross-encoder and a classifier.
"""

import asyncio
import json
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from quadriga.client import AsyncClient
from quadriga.client.decisions import Question
from quadriga.errors import QuadrigaError
from quadriga.sampling.pooling import Pooling
from tests.tiny_encoders import CLASSIFIERS, tiny_bert
from tests.tiny_models import SENTENCES
from tests.tiny_rankers import qwen3_reranker
from tests.waiting import wait_until_async

NAME = "tiny"
CLIENTS = 4
BY_SOCKET, BY_HTTP, BY_QUESTIONS = 24, 24, 8  # numbers of requests
QUERY = "Who has four horses?"
RETRY_S = 0.05
ACCEPT_TIMEOUT_S = 60.0
# What a gateway answers that is not ready, or cannot reach the ring now.
BUSY = (429, 502, 503, 504)
# What differs between two runs of one request.
_DIFFERENCES = ("id", "created", "total_duration", "load_duration", "input_tokens_details")
_LISTS = ("data", "results", "embeddings", "answers", "embedding")
_LIVE = re.compile(rb"quadriga:http_requests_live\{[^}]*\} ([0-9]+)")

# The numbers of the answers in a list, and their bytes.
Answer = tuple[list[int], bytes]
Call = tuple[str, dict[str, Any]]
Asked = Callable[[AsyncClient, int], Coroutine[Any, Any, "Answer"]]


class WrongAnswer(Exception):
    """A request that was answered with an error, or not in time."""


def texts_of(number: int) -> list[str]:
    """Return 1 to 150 different texts; more than the gateway has in the server at one time."""
    # Digits are tokens of their own; a number of several is unknown to a tiny encoder.
    ends = (" ".join(f"{number} {each}") for each in range(1 + number * 43 % 150))
    return [f"{SENTENCES[each % 3]} {end}" for each, end in enumerate(ends)]


def _vectors_by_http(number: int) -> list[Call]:
    texts = texts_of(number)
    return [
        ("/v1/embeddings", {"input": texts}),
        ("/v1/embeddings", {"input": texts, "encoding_format": "base64", "dimensions": 16}),
        ("/embed", {"inputs": texts}),
        ("/v2/embed", {"texts": texts, "embedding_types": ["float", "int8"]}),
        ("/api/embed", {"model": NAME, "input": texts}),
        ("/api/embeddings", {"model": NAME, "prompt": texts[0]}),
    ]


def _ranks_by_http(number: int) -> list[Call]:
    texts = texts_of(number)
    return [
        ("/v1/rerank", {"query": QUERY, "documents": texts, "return_documents": True}),
        ("/v2/rerank", {"query": QUERY, "documents": texts, "top_n": 3}),
        ("/rerank", {"query": QUERY, "texts": texts}),
        ("/v1/score", {"text_1": QUERY, "text_2": texts}),
    ]


def _labels_by_http(number: int) -> list[Call]:
    texts = texts_of(number)
    return [("/classify", {"input": texts}), ("/predict", {"inputs": [[text] for text in texts]})]


def _decisions_by_http(number: int) -> list[Call]:
    state = " ".join(texts_of(number)[:4])
    choices = [{"value": "horses"}, {"value": "a brown fox"}, {"value": True}]
    levels = [{"label": "low"}, {"label": "high"}]
    questions: list[dict[str, Any]] = [
        {"type": "predicate", "instructions": f"Is it {number}?"},
        {"type": "choice", "instructions": "What draws it?", "choices": choices},
        {"type": "score", "instructions": "How fast?", "levels": levels},
    ]
    named = {
        "horses": {"type": "noul", "instructions": f"Are there {number} horses?"},
        "what": {"type": "choice", "criteria": {"horses": None, "a fox": "It jumps."}},
    }
    return [
        ("/v1/decisions", {"input": state, "questions": questions}),
        ("/v1/systemone", {"state": state, "questions": named}),
    ]


async def _embedded(client: AsyncClient, number: int) -> Answer:
    vectors = [each.vector for each in await client.embed(texts_of(number), Pooling())]
    return list(range(len(vectors))), b"".join(vector.tobytes() for vector in vectors)


async def _scored(client: AsyncClient, number: int) -> Answer:
    return _comparable([each.score for each in await client.score(QUERY, texts_of(number))])


async def _ranked(client: AsyncClient, number: int) -> Answer:
    ranked = await client.rerank(QUERY, texts_of(number), top_n=9)
    return _comparable([[each.index, each.score] for each in ranked])


async def _decided(client: AsyncClient, number: int) -> Answer:
    questions: list[Question | str] = [
        Question("What draws it?", ["horses", "a brown fox"]),
        f"It is {number}.",
    ]
    decided = await client.decide(" ".join(texts_of(number)[:4]), questions)
    return _comparable([each.probabilities for each in decided])


async def _labelled(client: AsyncClient, number: int) -> Answer:
    return _comparable([each.probs for each in await client.classify(texts_of(number))])


@dataclass(frozen=True, slots=True)
class NumberModel:
    """A model, and the requests whose kinds take turns.

    Attributes:
        make: writes the model into a directory.
        flags: of its server.
        by_socket: functions of a client that return an answer.
        by_http: functions of a request's number that return calls.
        by_questions: functions as `by_socket` that first ask the server questions. A server that
            stops may have taken the questions, and then refuses the requests.
    """

    make: Callable[[Path], Path]
    flags: tuple[str, ...]
    by_socket: tuple[Asked, ...]
    by_http: tuple[Callable[[int], list[Call]], ...]
    by_questions: tuple[Asked, ...] = ()

    def call(self, number: int) -> Call:
        """Return path and body of a request by HTTP."""
        calls = [call for kind in self.by_http for call in kind(number)]
        return calls[number % len(calls)]


def _decoder(path: Path) -> Path:
    """Write a model that makes text, and ranks because of its name."""
    return qwen3_reranker(path / "Qwen3-Reranker-tiny")


MODELS = {
    "decoder": NumberModel(
        _decoder, ("--pooling", "mean"), (_embedded, _scored, _ranked),
        (_vectors_by_http, _ranks_by_http, _decisions_by_http), (_decided,),
    ),
    "encoder": NumberModel(tiny_bert, (), (_embedded,), (_vectors_by_http,)),
    "ranker": NumberModel(CLASSIFIERS["bert"], (), (_scored, _ranked), (_ranks_by_http,)),
    "classifier": NumberModel(CLASSIFIERS["roberta"], (), (_labelled,), (_labels_by_http,)),
}  # fmt: skip


class NumberRequests:
    """Requests of a server, all of which are sent at once.

    Args:
        model: what is asked for.
        endpoint: the public socket.
        url: of the gateway.
        timeout_s: a request that takes longer counts as lost.
        may_break: a broken connection, or the answer that the gateway is not ready, is no loss: the
            call is repeated, as clients do it. Without it such an answer is an error.
        by_http: with requests by HTTP.
        is_stopping: the server will stop, and takes no new requests.
        num_before: number of answers before `started`.

    Attributes:
        started: set when the server has accepted every request and has given the first answers.
        arrivals: times of answers.
        num_repeated: calls that were sent again.
    """

    def __init__(
        self,
        model: NumberModel,
        endpoint: str,
        url: str,
        timeout_s: float,
        may_break: bool = False,
        by_http: bool = True,
        is_stopping: bool = False,
        num_before: int = 1,
    ) -> None:
        self._model = model
        self._endpoint = endpoint
        self._url = url
        self._timeout_s = timeout_s
        self._may_break = may_break
        self._num_by_http = BY_HTTP if by_http else 0
        self._num_by_questions = 0 if is_stopping else BY_QUESTIONS * len(model.by_questions)
        self._num_before = num_before
        self._num_answered_by_http = 0
        self.started = asyncio.Event()
        self.arrivals: list[float] = []
        self.num_repeated = 0

    async def run(self) -> list[Answer | Exception]:
        """Return the answer of each request, or what went wrong.

        Those that a load may leave out are the last ones: by HTTP, and by questions.
        """
        timeout_s = self._timeout_s
        clients = [AsyncClient(self._endpoint, timeout_s, timeout_s) for _ in range(CLIENTS)]
        limits = aiohttp.ClientTimeout(total=None, sock_connect=timeout_s)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(timeout=limits, connector=connector) as session:
            try:
                await asyncio.gather(*(client.connect() for client in clients))
                asks, model = self._by_socket, self._model
                by_socket = (asks(model.by_socket, clients, n) for n in range(BY_SOCKET))
                by_http = (self._by_http(session, number) for number in range(self._num_by_http))
                by_questions = (
                    asks(model.by_questions, clients, n) for n in range(self._num_by_questions)
                )
                running = asyncio.gather(*by_socket, *by_http, *by_questions)
                starting = asyncio.ensure_future(self._set_started(clients, session))
                answers: list[Answer | Exception] = await running
                starting.cancel()
                return answers
            finally:
                self.started.set()
                await asyncio.gather(*(client.close() for client in clients))

    async def _set_started(
        self, clients: Sequence[AsyncClient], session: aiohttp.ClientSession
    ) -> None:
        """Set `started` once the server has read every request and has given the first answers."""
        while self._num_by_http:
            async with session.get(f"{self._url}/metrics") as response:
                found = _LIVE.search(await response.read())
            num_open = int(found[1]) if found else 0
            if num_open + self._num_answered_by_http >= self._num_by_http:
                break
            await asyncio.sleep(RETRY_S)
        # A client's messages are read in their order.
        await asyncio.gather(*(client.info() for client in clients))
        await wait_until_async(lambda: len(self.arrivals) >= self._num_before, ACCEPT_TIMEOUT_S)
        self.started.set()

    def _note(self, is_by_http: bool) -> None:
        self.arrivals.append(time.monotonic())
        self._num_answered_by_http += is_by_http

    async def _by_socket(
        self, asks: Sequence[Asked], clients: Sequence[AsyncClient], number: int
    ) -> Answer | Exception:
        ask, client = asks[number % len(asks)], clients[number % len(clients)]
        try:
            answer = await asyncio.wait_for(ask(client, number), self._timeout_s)
        except (QuadrigaError, asyncio.TimeoutError) as error:
            return error
        self._note(False)
        return answer

    async def _by_http(self, session: aiohttp.ClientSession, number: int) -> Answer | Exception:
        path, body = self._model.call(number)
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                async with session.post(self._url + path, json=body) as response:
                    content = await response.read()
                    problem = f"{path}: {response.status} {content[:300]!r}"
                    if response.status == 200:
                        self._note(True)
                        return _comparable(json.loads(content))
                    if response.status not in BUSY:
                        return WrongAnswer(problem)
            except (aiohttp.ClientError, ConnectionError, asyncio.TimeoutError) as error:
                problem = f"{path}: {error!r}"
            if not self._may_break or time.monotonic() > deadline:
                return WrongAnswer(problem)
            self.num_repeated += 1
            await asyncio.sleep(RETRY_S)

    def silence_after(self, moment: float) -> float:
        """Return the seconds from a moment to the last answer."""
        return max([moment, *self.arrivals]) - moment


def _comparable(body: Any) -> Answer:
    """Return what two runs of a request have in common: all numbers, to their last digit."""
    found = body
    if isinstance(body, dict):
        found = next(body[name] for name in _LISTS if name in body)
        found = found.get("float", found) if isinstance(found, dict) else found
    return list(range(len(found))), json.dumps(_kept(body)).encode()


def _kept(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _kept(each) for name, each in value.items() if name not in _DIFFERENCES}
    return [_kept(each) for each in value] if isinstance(value, list) else value
