"""A scheduler under random load, with a check of every answer: for property tests and long runs.

python -m tests.unit.chaos --steps 1000000 [--seed 0] [--window 0] [--adapters] [--pins]
    [--forks 10000] [--speculative-method none]
"""

import argparse
import random
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import BATCH_MODES, POLICIES, SchedulerArgs
from quadriga.wire.adapter import AdapterRef
from quadriga.wire.cache import CacheHint
from quadriga.wire.to_scheduler import (
    CacheRelease,
    DropAdapters,
    InfoRequest,
    PinAdapters,
    StopFound,
)
from scheduler_proc.planning.quarantine import MAX_WORKER_CRASHES
from tests.faults.inject import retract_one
from tests.unit.simulation import EOS, JUMPING, Observe, World, abort, reference, submit

PREFIXES = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [5, 6, 7, 8, 20, 21, 22, 23], [30] * 9, []]
ADAPTERS = ["first", "second", "third", "fourth", "fifth"]
KEYS = ["", "a", "b"]
PREFIXES += [[JUMPING, 5, 6, 7, 8, 20], [JUMPING]]


@dataclass
class SentRequest:
    """A request that was sent, to check its answer. first_ids: what the answer begins with."""

    prompt: list[int]
    max_new_tokens: int
    ignore_eos: bool
    adapter: str = ""
    stopped: bool = False
    timed: bool = False
    first_ids: list[int] = field(default_factory=list)
    is_fork: bool = False

    def expected(self) -> list[int]:
        """Return the answer of a fresh run with the same prompt and first tokens."""
        num_left = self.max_new_tokens - len(self.first_ids)
        prompt = self.prompt + self.first_ids
        return self.first_ids + reference(prompt, num_left, self.ignore_eos, self.adapter)


class Chaos:
    """A World, and every request that was sent to it."""

    def __init__(
        self,
        args: SchedulerArgs,
        num_pages: int,
        page_size: int,
        observe: Observe | None = None,
        window: int = 0,
        world_class: type[World] = World,
        can_guess: bool = False,
    ) -> None:
        self.world = world_class(
            args, num_pages, page_size, observe=observe, window=window, can_guess=can_guess
        )
        self.pool_tokens = num_pages * page_size
        self.num_pages = num_pages
        # With the page of the next token, a request needs those of its window, and no fewer than
        # one of them.
        pages_of_window = max(1, -(-(window - 1) // page_size))
        self.is_unbounded = window > 0 and pages_of_window < num_pages
        self.sent: dict[str, SentRequest] = {}

    def submit(
        self,
        prompt: list[int],
        max_new_tokens: int,
        ignore_eos: bool,
        client: bytes = b"c",
        priority: int = 0,
        timeout_s: float | None = None,
        adapter: str = "",
        cache: CacheHint | None = None,
        first_ids: list[int] | None = None,
    ) -> None:
        name = f"r{len(self.sent)}"
        self.sent[name] = SentRequest(
            prompt,
            max_new_tokens,
            ignore_eos,
            adapter,
            timed=timeout_s is not None,
            first_ids=first_ids or [],
            is_fork=first_ids is not None,
        )
        fields: dict[str, Any] = {
            "priority": priority, "cache": cache, "first_token_ids": first_ids
        }  # fmt: skip
        if adapter:
            fields |= {"adapter": AdapterRef(adapter, adapter), "cache_salt": f"{adapter}\0"}
        if timeout_s is not None:
            fields["deadline"] = self.world.worker.now + timeout_s
            fields["queue_deadline"] = self.world.worker.now + timeout_s / 2
        message = submit(name, prompt, max_new_tokens, client, ignore_eos, **fields)
        self.world.send(message)

    def fork(self, source: random.Random) -> bool:
        """Answer a request again from a token that it has. Return whether there is one."""
        name = source.choice(sorted(self.sent)) if self.sent else ""
        tokens, sent = self.world.detok.tokens.get(name, []), self.sent.get(name)
        if sent is None or not tokens:
            return False
        ignore_eos = source.random() < 0.5
        first_ids = tokens[: source.randint(0, len(tokens))]
        if not ignore_eos and EOS in first_ids:
            first_ids = first_ids[: first_ids.index(EOS)]
        self.submit(
            sent.prompt,
            len(first_ids) + source.choice([1, 2, 5, 12]),
            ignore_eos,
            source.choice([b"c", b"d"]),
            source.randint(-3, 3),
            adapter=sent.adapter,
            first_ids=first_ids,
        )
        return True

    def abort(self, number: int) -> None:
        name = f"r{number}"
        for client in (b"c", b"d"):
            self.world.send(abort(name, client))

    def stop(self, seq: int) -> None:
        """Report a stop string, as the detokenizer does."""
        name = self.world.detok.open.get(seq)
        if name is not None:
            self.sent[name].stopped = True
            self.world.send(StopFound([seq]))

    def release(self, key: str | None, flush_cache: bool) -> None:
        """Release the pins of a key, or of all and what is cached."""
        self.world.send(InfoRequest(b"e", "i", {}, flush_cache, CacheRelease("", key)))

    def finish(self) -> None:
        """Run until idle, and check that every request has its right answer."""
        self.world.run(100 * sum(len(a.prompt) + a.max_new_tokens for a in self.sent.values()) + 9)
        closed = self.world.detok.closed
        assert closed.keys() == self.sent.keys(), "a request has no answer"
        for name, sent in self.sent.items():
            self._check(sent, closed[name], self.world.detok.tokens.get(name, []))
        info = self.world.scheduler.info()
        assert info["pages_free"] + info["pages_cached"] == self.num_pages
        assert info["running"] == info["waiting"] == 0
        assert not info["adapters"]["running"] and not info["adapters"]["waiting"]

    def _check(self, sent: SentRequest, closed: Any, tokens: list[int]) -> None:
        expected = sent.expected()
        assert tokens == expected[: len(tokens)], "a wrong token"
        if closed.finish_reason == "error":
            needed = len(sent.prompt) + sent.max_new_tokens - 1
            is_poison = (
                self.world.num_crashes >= MAX_WORKER_CRASHES
                and "the worker died" in closed.error.message
            )
            is_too_long = needed > self.pool_tokens and not self.is_unbounded
            assert sent.timed or is_poison or is_too_long, closed.error
        elif closed.finish_reason != "abort" and not sent.stopped:
            assert tokens == expected, "tokens are missing"


def random_args(source: random.Random) -> SchedulerArgs:
    """Return any combination of flags that the command line accepts."""
    while True:
        policy = source.choice(POLICIES)
        args = SchedulerArgs(
            max_batch_size=source.randint(1, 6),
            prefill_max_batch_size=source.choice([None, 1, 2, 5]),
            prefill_max_tokens=source.choice([1, 4, 20, 100]),
            chunked_prefill_size=source.choice([None, -1, 1, 3, 8]),
            max_num_partial_prefills=source.choice([1, 2, 4]),
            max_running_requests=source.randint(1, 8),
            max_queued_requests=1000,
            batch_mode=source.choice(BATCH_MODES),
            batching=source.choice(["continuous"] * 4 + ["static"]),
            schedule_policy=policy,
            pack_lookahead=source.choice([32, 3]) if policy == "pack" else 32,
            priority_preemption_threshold=source.choice([None, 1])
            if policy == "priority"
            else None,
            fair_clients=source.random() < 0.3,
            schedule_conservativeness=source.choice([0.1, 1.0, 3.0]),
            disable_radix_cache=source.random() < 0.2,
            plan_at_once=source.random() < 0.3,
        )
        try:
            args.validate()
        except ConfigError:
            continue
        return args


def random_hint(source: random.Random) -> CacheHint | None:
    """Return what a request asks of the prefix cache."""
    hint = CacheHint(source.choice(KEYS), source.choice([0.02, 0.3, 1000.0]))
    return source.choice([None, hint])


def random_life(
    source: random.Random,
    steps: int,
    observe: Observe | None = None,
    window: int = 0,
    world_class: type[World] = World,
    speculative_method: str = "none",
    suspends: bool = False,
    has_adapters: bool = False,
    has_pins: bool = False,
    has_forks: bool = False,
) -> Chaos:
    """Run a random load on a random server, for at least so many steps and then until it is idle.

    Args:
        source: of all random choices.
        steps: minimum number of steps.
        observe: gets every message that the scheduler sends.
        window: number of tokens that a token sees in every layer; 0: all.
        world_class: of scheduler and worker.
        speculative_method: of the server, whose other flags are random.
        suspends: the worker is suspended as often as it crashes.
        has_adapters: requests have adapters, for more of which than the worker holds.
        has_pins: requests ask that what they compute is kept.
        has_forks: running and ended requests are answered again, from any of their tokens.
    """
    args = replace(random_args(source), speculative_method=speculative_method)
    if has_adapters:
        num_places = source.randint(1, 3)
        num_in_memory = num_places + source.randint(0, 2)
        args = replace(args, max_loras=num_places, max_cpu_loras=num_in_memory)
    if has_pins:
        args = replace(args, cache_pin_fraction=source.choice([0.1, 0.5, 1.0]))
    num_pages, page_size = source.randint(2, 16), source.choice([1, 2, 3, 4, 8])
    can_guess = speculative_method != "none"
    chaos = Chaos(args, num_pages, page_size, observe, window, world_class, can_guess)
    rate = source.choice([0.1, 0.5, 1.5])
    adapters = [""]
    if has_adapters:
        adapters = source.choice([["", "", "first"], ["", *ADAPTERS], ADAPTERS])
    crash_rate = source.choice([0.0, 0.0, 0.01, 0.1])
    retraction_rate = source.choice([0.0, 0.0, 0.0, 0.2, 1.0])
    for _ in range(steps):
        while source.random() < rate / (1 + rate):
            prefix = source.choice(PREFIXES)
            tail = [source.randint(3, 99) for _ in range(source.randint(1, 6))]
            chaos.submit(
                prefix[: source.randint(0, len(prefix))] + tail,
                source.choice([1, 2, 5, 12]),
                source.random() < 0.5,
                source.choice([b"c", b"d"]),
                source.randint(-3, 3),
                source.choice([None] * 9 + [0.1]),
                source.choice(adapters) if has_adapters else "",
                random_hint(source) if has_pins else None,
            )
        if has_forks:
            for _ in range(source.choice([0, 0, 0, 1, 3])):
                chaos.fork(source)
        if has_pins and source.random() < 0.03:
            chaos.release(source.choice([None, *KEYS]), source.random() < 0.2)
        if has_adapters and source.random() < 0.02:
            chaos.world.send(DropAdapters([source.choice(ADAPTERS)]))
        if has_adapters and source.random() < 0.02:
            names = source.sample(ADAPTERS, source.randrange(args.max_loras))
            chaos.world.send(PinAdapters([AdapterRef(name, name) for name in names]))
        if source.random() < 0.05:
            chaos.abort(source.randint(0, len(chaos.sent)))
        if source.random() < 0.03:
            chaos.stop(source.randint(0, len(chaos.sent)))
        if source.random() < retraction_rate:
            retract_one(chaos.world.scheduler, source.randrange(100))
        if source.random() < crash_rate:
            chaos.world.restart_worker()
        if suspends and source.random() < crash_rate:
            chaos.world.suspend_worker()
        if source.random() < crash_rate:
            chaos.world.kill_detok()
        if chaos.world.detok.session < 0 and source.random() < 0.5:
            chaos.world.restart_detok()
        if not chaos.world.step():
            chaos.world.wake(chaos.world.worker.now + 0.01)
    chaos.world.kill_detok()
    chaos.world.restart_detok()
    chaos.finish()
    return chaos


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--window", type=int, default=0, help="of every layer; 0: none")
    parser.add_argument("--speculative-method", default="none")
    parser.add_argument("--adapters", action="store_true")
    parser.add_argument("--pins", action="store_true")
    parser.add_argument("--forks", type=int, default=0, help="number of forks, in place of steps")
    arguments = parser.parse_args()
    began, steps, seed = time.monotonic(), 0, arguments.seed
    counts: Counter[str] = Counter()
    while steps < arguments.steps if not arguments.forks else counts["forks"] < arguments.forks:
        source = random.Random(seed)
        try:
            chaos = random_life(
                source,
                100,
                window=arguments.window,
                speculative_method=arguments.speculative_method,
                has_adapters=arguments.adapters,
                has_pins=arguments.pins,
                suspends=bool(arguments.forks),
                has_forks=bool(arguments.forks),
            )
        except BaseException:
            print(f"seed {seed}: {random_args(random.Random(seed))}")
            raise
        steps += chaos.world.scheduler.lifecycle.stats.steps
        counts.update(c.finish_reason for c in chaos.world.detok.closed.values())
        info = chaos.world.scheduler.info()
        counts["worker crashes"] += chaos.world.num_crashes
        counts["retractions"] += info["retractions"]
        counts["cached tokens"] += info["cached_tokens_total"]
        for name in ("gave_way", "over_limit", "expired", "released") if arguments.pins else ():
            counts[f"pins {name}"] += info[f"cache_pins_{name}_total"]
        if arguments.forks:
            counts["forks"] += sum(sent.is_fork for sent in chaos.sent.values())
        counts["right guesses"] += info.get("spec_decode_num_accepted_tokens_total", 0)
        seed += 1
    print(
        f"{steps} steps, {seed - arguments.seed} servers, {dict(counts)},"
        f" {time.monotonic() - began:.0f} s"
    )


if __name__ == "__main__":
    main()
