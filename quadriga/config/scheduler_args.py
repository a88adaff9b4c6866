"""SchedulerArgs: the flags of scheduler_proc."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from quadriga.config.flags import flag, flag_name, positive
from quadriga.errors import ConfigError

BATCH_MODES = ("prefill-first", "mixed", "decode-first", "alternate")
SINGLE_CHUNK = 256
"""Tokens that a step may compute of a single prompt, where fewer of several are enough."""
POLICIES = ("fcfs", "lpm", "dfs-weight", "pack", "priority", "shortest")


@dataclass(frozen=True, slots=True)
class SchedulerArgs:
    """What runs when (scheduler_proc)."""

    max_batch_size: int = flag(64, "requests in one decode step")
    prefill_max_batch_size: int | None = flag(
        None, "waiting requests that one step may admit (default: --max-batch-size)"
    )
    prefill_max_tokens: int = flag(16384, "prompt tokens that one prefill step may hold")
    chunked_prefill_size: int | None = flag(
        None,
        "prompt tokens of one step; a longer prompt is computed in chunks of that size, -1: never"
        " (default: on a CPU as many as keep it busy, measured at the start, or 256 of a single"
        " prompt where that is more; 8192 on a GPU)",
    )
    max_running_requests: int = flag(256, "requests that hold a slot at the same time")
    max_queued_requests: int = flag(4096, "waiting requests; over it a request is refused at once")
    max_requests_per_client: int | None = flag(
        None, "open requests of one client; over it a request is refused at once (default: any)"
    )
    batch_mode: str = flag("mixed", "what a step computes: see docs/scheduling.md", BATCH_MODES)
    decode_first: bool = flag(False, "the same as --batch-mode decode-first")
    batching: str = flag(
        "continuous",
        "static: a batch is run to its end before the next is admitted (to compare against)",
        ("continuous", "static"),
    )
    schedule_policy: str = flag("fcfs", "order of the waiting queue", POLICIES)
    pack_lookahead: int | None = flag(
        None, "pack: how many waiting requests it looks at to fill a step (default: 32)"
    )
    pack_fifo_every: int | None = flag(
        None, "pack: every N-th round is first come, first served (default: 8)"
    )
    priority_preemption_threshold: int | None = flag(
        None,
        "priority: a waiting request whose priority is higher by so much takes the place of a"
        " running one (default: 10)",
    )
    fair_clients: bool = flag(
        False, "clients take turns (deficit round robin), whatever each of them has sent"
    )
    schedule_conservativeness: float = flag(1.0, "larger: admit less and retract less, in (0, 10]")
    disable_radix_cache: bool = flag(False, "do not reuse the KV of equal prompt beginnings")
    no_prefix_cache: bool = flag(False, "the same as --disable-radix-cache")
    plan_at_once: bool = flag(
        False, "plan a step as soon as there is room, not as late as the worker allows"
    )
    journal: str = flag(
        "",
        "directory of the journal, from which another scheduler goes on with the requests; one that"
        " outlives the server is synced (default: the run directory, which does not)",
    )
    no_journal: bool = flag(False, "requests do not survive the end of the scheduler")
    resume: bool = flag(False, "go on with the requests that an earlier run left in --journal")

    def validate(self) -> None:
        for name in (
            "max_batch_size",
            "prefill_max_batch_size",
            "prefill_max_tokens",
            "max_running_requests",
            "max_queued_requests",
            "max_requests_per_client",
            "pack_lookahead",
            "pack_fifo_every",
            "priority_preemption_threshold",
        ):
            positive(name, getattr(self, name))
        chunk = self.chunked_prefill_size
        if chunk is not None and chunk != -1 and chunk <= 0:
            raise ConfigError(
                f"chunked_prefill_size must be positive, or -1 for whole prompts (it is {chunk})"
            )
        if not 0 < self.schedule_conservativeness <= 10:
            raise ConfigError(
                f"schedule_conservativeness is {self.schedule_conservativeness}:"
                " it must be above 0 and at most 10"
            )
        self._check_together()

    def _check_together(self) -> None:
        """ConfigError for flags that contradict each other, or of which one would do nothing."""
        mode = self.batch_mode
        if self.decode_first and mode not in (self.default("batch_mode"), "decode-first"):
            raise ConfigError(f"--decode-first contradicts --batch-mode {mode}: leave one out")
        if self.batching == "static" and (
            self.decode_first or mode not in (self.default("batch_mode"), "prefill-first")
        ):
            raise ConfigError(
                "--batching static prefills a batch and then decodes it: it contradicts"
                f" --batch-mode {'decode-first' if self.decode_first else mode}"
            )
        if self.resume and not self.journal:
            raise ConfigError("--resume goes on with a journal: say which with --journal DIR")
        if self.no_journal and self.journal:
            raise ConfigError("--no-journal contradicts --journal: leave one out")
        if not self.prefix_cache and self.schedule_policy in ("lpm", "dfs-weight"):
            raise ConfigError(
                f"--schedule-policy {self.schedule_policy} orders by cached prefixes:"
                " it needs the prefix cache, leave --disable-radix-cache out"
            )
        for name, policy in (
            ("pack_lookahead", "pack"),
            ("pack_fifo_every", "pack"),
            ("priority_preemption_threshold", "priority"),
        ):
            if getattr(self, name) is not None and self.schedule_policy != policy:
                raise ConfigError(
                    f"{flag_name(name)} has no effect with --schedule-policy"
                    f" {self.schedule_policy}: add --schedule-policy {policy}, or leave it out"
                )

    @classmethod
    def default(cls, name: str) -> Any:
        """The value of a flag that was not given."""
        return next(field.default for field in dataclasses.fields(cls) if field.name == name)

    @property
    def prefill_width(self) -> int:
        return self.prefill_max_batch_size or self.max_batch_size

    @property
    def mode(self) -> str:
        """--batch-mode, with --decode-first taken in; static batching prefills first."""
        if self.decode_first:
            return "decode-first"
        return "prefill-first" if self.batching == "static" else self.batch_mode

    @property
    def prefix_cache(self) -> bool:
        return not (self.disable_radix_cache or self.no_prefix_cache)

    @property
    def measures_chunks(self) -> bool:
        """The worker finds out how many tokens of prompts a step had best hold."""
        return self.chunked_prefill_size is None

    def prefill_budget(self, measured: int) -> int:
        """Prompt tokens that one step may hold. measured: those that keep the worker busy."""
        chunk = self.chunk_size(measured)
        return self.prefill_max_tokens if chunk is None else min(chunk, self.prefill_max_tokens)

    def prefill_slack(self, measured: int) -> int:
        """Prompt tokens that a step may hold beyond that, where no other step of prompts need
        follow then: half a step, for a small one would not keep the worker busy."""
        if not self.measures_chunks:
            return 0
        budget = self.prefill_budget(measured)
        return min(budget // 2, self.prefill_max_tokens - budget)

    def longest_chunk(self, measured: int) -> int:
        """Tokens that a step may compute of a single prompt. More of several prompts would make
        the first ones wait for the last; a long one waits for nobody but itself."""
        budget = self.prefill_budget(measured)
        if not self.measures_chunks:
            return budget
        return min(max(budget, SINGLE_CHUNK), self.prefill_max_tokens)

    def chunk_size(self, measured: int) -> int | None:
        """Tokens of the largest chunk; None where prompts are never cut."""
        if self.chunked_prefill_size is None:
            return measured
        return None if self.chunked_prefill_size == -1 else self.chunked_prefill_size
