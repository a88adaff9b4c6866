"""A request's way through four real processes, seen from the client."""

import asyncio
import shutil
import subprocess
import sys
import threading

import pytest

from quadriga import CacheHint
from quadriga.client import AsyncClient, ChatOptions, Client, Completion, SamplingParams
from quadriga.client.types import Prompt
from quadriga.errors import DeadlineExceeded, InvalidRequest, PromptTooLong, ServerUnreachable
from tests.server import ROOT, Server, settle, wait_until

GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
TOOL = {"type": "function", "function": {"name": "weather"}}
TEXT = "The quick brown fox"
# On a busy machine the 200 tokens of a stream may be there before its abort is.
MAX_ATTEMPTS = 10


def greedy(**changes: object) -> SamplingParams:
    fields: dict[str, object] = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    return SamplingParams(**(fields | changes))  # type: ignore[arg-type]


def test_a_text_gives_text_ids_usage_and_a_reason(server: Server) -> None:
    with Client(server.endpoint) as client:
        completion = client.generate(TEXT, GREEDY)
    assert len(completion.token_ids) == 12
    assert completion.finish_reason == "length"
    assert completion.usage.completion_tokens == 12
    assert completion.usage.prompt_tokens > 0
    assert completion.text


def test_the_chunks_of_a_stream_joined_are_the_completion(server: Server) -> None:
    with Client(server.endpoint) as client:
        whole = client.generate(TEXT, GREEDY)
        chunks = list(client.stream(TEXT, GREEDY))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [i for chunk in chunks for i in chunk.token_ids] == whole.token_ids
    assert len(chunks) > 1
    assert chunks[-1].completion is not None
    assert all(chunk.completion is None for chunk in chunks[:-1])


def test_the_times_of_the_stages_are_in_order(server: Server) -> None:
    with Client(server.endpoint) as client:
        timings = client.generate(TEXT, GREEDY).timings
    stages = [timings.submitted, timings.received, timings.tokenized, timings.admitted,
              timings.first_token, timings.token_times[-1], timings.detokenized,
              timings.delivered]  # fmt: skip
    assert stages == sorted(stages)
    assert timings.token_times == sorted(timings.token_times)
    assert timings.token_times[0] == timings.first_token
    assert len(timings.token_times) == 12


def test_a_list_of_prompts_of_every_kind_gives_completions_in_the_same_order(
    server: Server,
) -> None:
    prompts: list[Prompt] = [TEXT, [5, 6, 7], [{"role": "user", "content": "hi"}], "", []]
    with Client(server.endpoint) as client:
        together = client.generate(prompts, GREEDY)
        alone = [client.generate(prompt, GREEDY) for prompt in prompts[:3]]
    assert [c.token_ids for c in together[:3]] == [c.token_ids for c in alone]
    assert together[3].token_ids == together[4].token_ids
    assert together[3].usage.prompt_tokens == 1, "an empty prompt is one end-of-text token"


def test_max_new_tokens_1_gives_one_token(server: Server) -> None:
    with Client(server.endpoint) as client:
        assert len(client.generate(TEXT, greedy(max_new_tokens=1)).token_ids) == 1


def test_a_stop_string_ends_the_text_before_it(server: Server) -> None:
    with Client(server.endpoint) as client:
        whole = client.generate(TEXT, GREEDY)
        middle = whole.text[len(whole.text) // 2 :][:3]
        stopped = client.generate(TEXT, greedy(stop=[middle, "never seen"]))
        streamed = "".join(c.text for c in client.stream(TEXT, greedy(stop=middle)))
    assert stopped.finish_reason == "stop"
    assert stopped.matched_stop == middle
    assert stopped.text == streamed == whole.text[: whole.text.index(middle)]
    assert stopped.token_ids == whole.token_ids[: len(stopped.token_ids)]


def test_a_stop_token_ends_the_request_and_names_itself(server: Server) -> None:
    with Client(server.endpoint) as client:
        whole = client.generate(TEXT, GREEDY)
        stop_at = whole.token_ids[4]
        stopped = client.generate(TEXT, greedy(stop_token_ids=[stop_at]))
    assert stopped.finish_reason == "stop"
    assert stopped.matched_stop == stop_at
    assert stopped.token_ids == whole.token_ids[: whole.token_ids.index(stop_at) + 1]


def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(server: Server) -> None:
    seeded = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, seed=7, max_new_tokens=10)
    noise = SamplingParams(temperature=1.3, max_new_tokens=10)

    async def in_a_crowd() -> list[int]:
        async with AsyncClient(server.endpoint) as client:
            others = [client.submit([9 + n] * (n + 1), noise) for n in range(12)]
            completion = await client.submit(TEXT, seeded).completion()
            await asyncio.gather(*(other.completion() for other in others))
            return completion.token_ids

    with Client(server.endpoint) as client:
        alone = client.generate(TEXT, seeded).token_ids
        other_seed = client.generate(
            TEXT, SamplingParams(temperature=1.0, seed=8, max_new_tokens=10)
        )
    assert asyncio.run(in_a_crowd()) == alone
    assert other_seed.token_ids != alone


def aborted_after(client: Client, num_chunks: int) -> Completion:
    """Return how a stream ends that is aborted after `num_chunks` chunks."""
    completion = None
    for number, chunk in enumerate(client.stream(TEXT, greedy(max_new_tokens=200)), start=1):
        if number == num_chunks:
            client.abort(chunk.request_id)
        completion = chunk.completion
    assert completion is not None
    return completion


def test_an_aborted_stream_ends_with_abort_and_what_it_had(server: Server) -> None:
    with Client(server.endpoint) as client:
        attempts = (aborted_after(client, 4) for _ in range(MAX_ATTEMPTS))
        completion = next(done for done in attempts if done.finish_reason != "length")
    assert completion.finish_reason == "abort"
    assert 4 <= len(completion.token_ids) < 200
    settle(server.endpoint)


def ends_after_leaving(client: Client) -> dict[str, int]:
    """Leave a stream after its first chunk. Return the further ends that follow, by reason."""
    before = client.info()["ended"]
    for _ in client.stream(TEXT, greedy(max_new_tokens=200)):
        break
    wait_until(lambda: client.info()["ended"] != before, 10)
    return {reason: count - before[reason] for reason, count in client.info()["ended"].items()}


def test_leaving_a_stream_early_aborts_the_request(server: Server) -> None:
    with Client(server.endpoint) as client:
        attempts = (ends_after_leaving(client) for _ in range(MAX_ATTEMPTS))
        ends = next(ends for ends in attempts if not ends["length"])
    assert ends["abort"] == 1
    settle(server.endpoint)


def test_a_deadline_raises_and_aborts(server: Server) -> None:
    with Client(server.endpoint) as client, pytest.raises(DeadlineExceeded, match=r"0\.01 s"):
        client.generate([TEXT] * 40, greedy(max_new_tokens=200), timeout=0.01)
    settle(server.endpoint)


@pytest.mark.timeout(20)
def test_an_endpoint_without_server_is_an_error_after_the_connect_timeout() -> None:
    with (
        pytest.raises(ServerUnreachable, match=r"within 0\.3 s"),
        Client("tcp://127.0.0.1:9", connect_timeout=0.3),
    ):
        pass


@pytest.mark.parametrize(
    ("prompt", "params", "named"),
    [
        (TEXT, {"max_new_tokens": 0}, "max_new_tokens is 0"),
        (TEXT, {"max_new_tokens": 10**9}, "max_new_tokens is 1000000000"),
        (TEXT, {"temperature": float("nan")}, "temperature is nan"),
        ([5, 600], {}, "holds 600: ids of this model are 0 to 511"),
        ([-1], {}, "holds -1"),
        ([5] * 300, {}, "300 tokens"),
        ([{"role": "user", "content": 5}], {}, "content"),
        ([2**40], {}, "prompt_token_ids holds 1099511627776: token ids are 0 to 2147483647"),
        (17, {}, "must be a string"),
    ],
)
def test_bad_input_is_refused_by_name_and_the_server_lives(
    server: Server, prompt: object, params: dict[str, object], named: str
) -> None:
    with Client(server.endpoint) as client:
        with pytest.raises(InvalidRequest) as caught:
            client.generate(prompt, SamplingParams(**params))  # type: ignore[arg-type,call-overload]
        assert named in str(caught.value)
        assert len(client.generate(TEXT, GREEDY).token_ids) == 12


def test_a_prompt_over_the_context_is_refused_or_truncated_as_asked(server: Server) -> None:
    ids = list(range(3, 203)) * 2
    with Client(server.endpoint) as client:
        with pytest.raises(PromptTooLong, match="400 tokens"):
            client.generate(ids, GREEDY)
        cut = client.generate(ids, GREEDY, truncate_prompt=True)
        by_hand = client.generate(ids[-255:], greedy(max_new_tokens=1))
    assert cut.usage.prompt_tokens == 255
    assert cut.token_ids == by_hand.token_ids


def test_encoding_a_long_prompt_delays_no_other_client(server: Server) -> None:
    long_text = "The quick brown fox jumps over the lazy dog. " * 150_000
    refused: list[Exception] = []

    def ask_long() -> None:
        with Client(server.endpoint) as other:
            try:
                other.generate(long_text, GREEDY)
            except InvalidRequest as error:
                refused.append(error)

    with Client(server.endpoint) as client:
        thread = threading.Thread(target=ask_long)
        thread.start()
        answers = 0
        while thread.is_alive():
            client.generate("short", greedy(max_new_tokens=2))
            answers += 1
        thread.join()
    assert answers >= 3, "short requests were answered while the long one was encoded"
    assert isinstance(refused[0], PromptTooLong)


def test_many_clients_at_once_each_get_their_own(server: Server) -> None:
    async def one(number: int) -> list[int]:
        async with AsyncClient(server.endpoint) as client:
            return (await client.generate([3 + number] * 5, GREEDY)).token_ids

    async def all_of_them() -> list[list[int]]:
        return await asyncio.gather(*(one(number) for number in range(24)))

    together = asyncio.run(all_of_them())
    with Client(server.endpoint) as client:
        alone = [client.generate([3 + number] * 5, GREEDY).token_ids for number in range(24)]
    assert together == alone


def test_info_reports_the_servers_settings_and_load(server: Server) -> None:
    info = settle(server.endpoint)
    assert info["ready"] is True
    assert info["dtype"] == "float32"
    assert info["context_length"] == 256
    assert info["pages_total"] * info["page_size"] == 8192
    assert set(info["pids"]) == {
        "launcher", "tokenizer_proc", "scheduler_proc", "worker_proc", "detok_proc",
    }  # fmt: skip


@pytest.mark.parametrize("example", ["raw_client.py", "stream.py", "many_streams.py"])
def test_the_examples_run(server: Server, example: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / example), server.endpoint],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed")
def test_the_example_in_node_prints_what_the_one_in_python_prints(server: Server) -> None:
    printed = [
        subprocess.run(
            [program, str(ROOT / "examples" / example), server.endpoint],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for program, example in ((sys.executable, "raw_client.py"), ("node", "raw_client.mjs"))
    ]
    assert printed[0] == printed[1]
    assert printed[0].strip()


def test_text_becomes_ids_and_ids_become_text_again(server: Server) -> None:
    with Client(server.endpoint) as client:
        ids = client.tokenize(TEXT)
        assert client.detokenize(ids) == TEXT
        long_text = TEXT * 500
        assert client.detokenize(client.tokenize(long_text)) == long_text
        chat = client.tokenize([{"role": "user", "content": "hi"}])
        assert client.detokenize(chat, skip_special_tokens=False).startswith("<|im_start|>user\nhi")
        assert client.generate(TEXT, GREEDY).usage.prompt_tokens == len(ids)
        with pytest.raises(InvalidRequest, match="token_ids holds 600"):
            client.detokenize([600])
        described = client.tokenize([{"role": "user", "content": "hi"}], ChatOptions(tools=[TOOL]))
        assert '{"name": "weather"}' in client.detokenize(described)


def test_a_flushed_cache_is_empty_and_answers_stay_the_same(server: Server) -> None:
    ids = list(range(3, 103))
    with Client(server.endpoint) as client:
        before = client.generate(ids, GREEDY)
        settle(server.endpoint)
        assert client.flush_cache() >= 6
        assert client.info()["pages_cached"] == 0
        after = client.generate(ids, GREEDY)
    assert after.token_ids == before.token_ids
    assert after.usage.cached_tokens == 0


def test_what_a_request_asks_to_keep_is_released_by_its_key(server: Server) -> None:
    ids = list(range(103, 203))
    with Client(server.endpoint) as client:
        before = client.info()
        client.generate(ids, GREEDY, cache=CacheHint("session", ttl_s=60))
        settle(server.endpoint)
        kept = client.info()
        assert kept["cache_pins"] == before["cache_pins"] + 1
        assert kept["cache_pinned_pages"] >= 6
        assert client.release_cache("another") == 0
        assert client.release_cache("session") == 1
        assert client.info()["cache_pins"] == before["cache_pins"]
        with pytest.raises(InvalidRequest, match=r"cache\.ttl_s is 0"):
            client.generate(ids, GREEDY, cache=CacheHint("session", ttl_s=0.0))
        with pytest.raises(InvalidRequest, match=r"cache\.key has 513 characters"):
            client.release_cache("k" * 513)


def test_clamped_new_tokens_fill_the_context(server: Server) -> None:
    with Client(server.endpoint) as client:
        params = greedy(max_new_tokens=256)
        full = client.generate([5] * 250, params, clamp_max_new_tokens=True)
        assert len(full.token_ids) == 6
        with pytest.raises(PromptTooLong):
            client.generate([5] * 256, params, clamp_max_new_tokens=True)
