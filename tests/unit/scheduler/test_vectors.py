"""Requests for vectors: in the same queue, batches and journal as requests for tokens."""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quadriga.sampling.pooling import LAST, LOGPROBS, MEAN, Pooling
from quadriga.server.config.engine_args import SchedulerArgs
from quadriga.wire.to_scheduler import Submit
from scheduler_proc.journal.recovery import read_journal
from scheduler_proc.journal.writer import FILE_NAME
from tests.unit.journal_runs import MortalWorld
from tests.unit.simulation import World, reference, submit, vector_of


def ask(name: str, prompt: list[int], method: str) -> Submit:
    message = submit(name, prompt, 1)
    params = msgspec.structs.replace(message.params, pooling=Pooling(method))
    return msgspec.structs.replace(message, params=params)


def random_texts(count: int, seed: int) -> dict[str, list[int]]:
    draw = random.Random(seed)
    common = [draw.randrange(3, 90) for _ in range(40)]
    return {
        f"v{number}": common[: draw.choice([0, 0, 16, 40])]
        + [draw.randrange(3, 90) for _ in range(draw.randrange(1, 60))]
        for number in range(count)
    }


@pytest.mark.parametrize("method", [LAST, MEAN])
@pytest.mark.parametrize("flags", [{}, {"chunked_prefill_size": 16}, {"max_batch_size": 2}])
def test_vectors_come_beside_tokens(method: str, flags: dict[str, Any]) -> None:
    world = World(SchedulerArgs(**flags))
    texts = random_texts(30, 1)
    chats = {f"t{number}": [number + 3] * (number + 1) for number in range(6)}
    for number, (name, text) in enumerate(texts.items()):
        world.send(ask(name, text, method))
        if number % 5 == 0:
            chat = f"t{number // 5}"
            world.send(submit(chat, chats[chat], 12, ignore_eos=True))
            world.step()
    world.run()
    for name, text in texts.items():
        end = world.detok.closed[name]
        assert (end.finish_reason, end.vector) == ("stop", vector_of(text))
        assert end.prompt_tokens == len(text)
        assert name not in world.detok.tokens, "a vector has no token"
    for name, prompt in chats.items():
        assert world.detok.tokens[name] == reference(prompt, 12, True)
    num_tokens = sum(map(len, (*texts.values(), *chats.values())))
    assert world.scheduler.info()["prompt_tokens_total"] == num_tokens
    world.scheduler.check()


def test_a_last_token_comes_from_the_cache_and_a_mean_does_not() -> None:
    world = World(SchedulerArgs())
    text = list(range(3, 80))
    for number, method in enumerate([LAST, LAST, MEAN]):
        world.send(ask(f"v{number}", text, method))
        world.run()
    cached = [world.detok.closed[f"v{number}"].cached_tokens for number in range(3)]
    assert cached[0] == 0
    assert cached[1] > 0
    assert cached[2] == 0


@pytest.mark.parametrize("num_last", [1, 5, 30, 76])
def test_the_last_tokens_that_are_scored_are_computed_in_one_step(num_last: int) -> None:
    world = World(SchedulerArgs(chunked_prefill_size=16))
    text = list(range(3, 80))
    scored = Pooling(LOGPROBS, num_last=num_last)
    for name in ("first", "second"):
        message = submit(name, text, 1)
        params = msgspec.structs.replace(message.params, pooling=scored)
        world.send(msgspec.structs.replace(message, params=params))
        world.run()
        assert world.detok.closed[name].vector == vector_of(text)
    cached = world.detok.closed["second"].cached_tokens
    page_size = world.worker.page_size
    assert cached == (len(text) - 1 - num_last) // page_size * page_size


def test_vectors_survive_crashes_of_the_worker() -> None:
    world = World(SchedulerArgs(max_batch_size=4, chunked_prefill_size=32))
    texts = random_texts(20, 2)
    world.send(*(ask(name, text, MEAN) for name, text in texts.items()))
    for _ in range(3):
        world.step()
        world.restart_worker()
    world.run()
    assert {name: world.detok.closed[name].vector for name in texts} == {
        name: vector_of(text) for name, text in texts.items()
    }


def test_vectors_survive_crashes_of_the_scheduler_and_the_detokenizer(tmp_path: Path) -> None:
    world = MortalWorld(SchedulerArgs(max_batch_size=4), tmp_path)
    texts = random_texts(20, 3)
    world.send(*(ask(name, text, LAST) for name, text in texts.items()))
    for turn in range(4):
        world.step()
        if turn % 2:
            world.kill_detok()
            world.restart_detok()
        world.restart_scheduler()
    world.run()
    assert {name: world.detok.closed[name].vector for name in texts} == {
        name: vector_of(text) for name, text in texts.items()
    }


def test_the_journal_has_a_vector_request_until_the_frontend_has_its_end(tmp_path: Path) -> None:
    world = MortalWorld(SchedulerArgs(), tmp_path)
    world.kill_detok()
    world.send(ask("v", [5, 6, 7], MEAN), submit("t", [8], 2, ignore_eos=True))
    for _ in range(6):
        world.step()
    assert not world.scheduler.lifecycle.table, "both have ended"
    first, second = read_journal(tmp_path / FILE_NAME).requests
    assert (first.message.params.pooling, first.ended) == (Pooling(MEAN), None)
    assert second.ended is not None
    world.restart_detok()
    world.run()
    assert world.detok.closed["v"].vector == vector_of([5, 6, 7])
    (left,) = read_journal(tmp_path / FILE_NAME).requests
    assert left.message.request_id == "t"


def test_the_journal_keeps_log_probabilities_for_a_replay(tmp_path: Path) -> None:
    world, prompt = MortalWorld(SchedulerArgs(), tmp_path), [5, 6, 7]
    message = submit("v", prompt, 1)
    params = msgspec.structs.replace(message.params, pooling=Pooling(LOGPROBS, token_ids=[3]))
    world.send(msgspec.structs.replace(message, params=params))
    world.run()
    assert world.detok.closed["v"].vector == vector_of(prompt)
    for _ in range(2):
        (kept,) = read_journal(tmp_path / FILE_NAME).requests
        assert (kept.vector, kept.acknowledged) == (vector_of(prompt), True)
        assert kept.ended is not None
        world.restart_scheduler()  # which writes the file anew


def test_log_probabilities_are_not_computed_again_by_a_scheduler_that_has_them(
    tmp_path: Path,
) -> None:
    world, prompt = MortalWorld(SchedulerArgs(), tmp_path), [5, 6, 7]
    world.kill_detok()
    message = submit("v", prompt, 1)
    params = msgspec.structs.replace(message.params, pooling=Pooling(LOGPROBS, token_ids=[3]))
    world.send(msgspec.structs.replace(message, params=params))
    for _ in range(6):
        world.step()
    world.restart_scheduler()
    assert not world.scheduler.lifecycle.table, "it has ended, and is not queued again"
    world.restart_detok()
    world.run()
    assert world.detok.closed["v"].vector == vector_of(prompt)
