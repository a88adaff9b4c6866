"""SchedulerArgs: the flags of scheduler_proc."""

from dataclasses import dataclass

from quadriga.config.flags import check_positive, flag, flag_name
from quadriga.errors import ConfigError

BATCH_MODES = ("prefill-first", "mixed", "decode-first", "alternate")
# A step may compute so many tokens of a single prompt even if fewer keep the worker busy.
MIN_SINGLE_CHUNK_TOKENS = 256
MAX_SPECULATIVE_TOKENS = 63
POLICIES = ("fcfs", "lpm", "dfs-weight", "pack", "priority", "shortest")


@dataclass(frozen=True, slots=True)
class SchedulerArgs:
    """Scheduling (scheduler_proc)."""

    max_batch_size: int = flag(64, "requests in one decode step", basic=True)
    prefill_max_batch_size: int | None = flag(
        None, "waiting requests that one step may admit (default: --max-batch-size)"
    )
    prefill_max_tokens: int = flag(
        16384, "prompt tokens that one prefill step may hold", unit="TOKENS"
    )
    chunked_prefill_size: int | None = flag(
        None,
        "prompt tokens of one step; a longer prompt is computed in chunks of this size. -1: prompts"
        " are never cut (default: 8192 on a GPU; measured at the start on a CPU)",
        unit="TOKENS",
    )
    max_num_partial_prefills: int = flag(
        4,
        "prompts that may be partly computed at the same time, so that short ones pass a long one;"
        " 1: a prompt that is cut is computed before any other begins",
    )
    itl_target: float | None = flag(
        None,
        "milliseconds that a step may be expected to take, by what steps have taken: bounds the"
        " prompt tokens of a step, so that running streams get their next token in time (default:"
        " no bound)",
        unit="MS",
    )
    max_running_requests: int = flag(256, "requests that hold a slot at the same time")
    max_queued_requests: int = flag(4096, "waiting requests; further ones are refused at once")
    max_requests_per_client: int | None = flag(
        None, "open requests of one client; further ones are refused at once (default: no limit)"
    )
    batch_mode: str = flag(
        "mixed",
        "what a step computes: see docs/scheduling.md",
        BATCH_MODES,
        alias="decode_first",
        alias_value="decode-first",
    )
    batching: str = flag(
        "continuous",
        "static: run a batch to its end before the next is admitted (for comparison)",
        ("continuous", "static"),
    )
    schedule_policy: str = flag("fcfs", "order of the waiting queue", POLICIES)
    pack_lookahead: int | None = flag(
        None, "pack: number of waiting requests considered to fill a step (default: 32)"
    )
    pack_fifo_every: int | None = flag(
        None, "pack: every N-th step is filled first come, first served (default: 8)"
    )
    priority_preemption_threshold: int | None = flag(
        None,
        "priority: difference in priority from which a waiting request preempts a running one"
        " (default: 10)",
    )
    fair_clients: bool = flag(
        False, "serve clients in turns (deficit round robin), however much each has sent"
    )
    fair_tenants: bool = flag(
        False, "serve tenants in turns by their weights; --keys and --tenants-by imply it"
    )
    batch_concurrency_beside: int = flag(
        0,
        "lines of batches, and other requests of the priority -1000, that run at one time beside"
        " others; the rest of them pause",
    )
    schedule_conservativeness: float = flag(1.0, "larger: admit less and retract less, in (0, 10]")
    disable_radix_cache: bool = flag(
        False, "do not reuse the KV cache of common prompt prefixes", alias="no_prefix_cache"
    )
    plan_at_once: bool = flag(
        False, "plan each step as early as possible, instead of as late as the worker allows"
    )
    speculative_method: str = flag(
        "auto",
        "guess tokens from the request's own text and from recent answers, and verify them: auto"
        " with few requests at a time, as far as it makes answers faster (native kernels of a CPU"
        " only); ngram wherever text repeats; self: a copy of the model in 4 bits drafts them, as"
        " far as that makes answers faster (CPU only)",
        ("none", "ngram", "auto", "self"),
    )
    num_speculative_tokens: int = flag(
        15, "largest number of tokens that are guessed for a request in one step", unit="TOKENS"
    )
    journal: str = flag(
        "",
        "directory of the journal, from which a restarted scheduler recovers all requests; a"
        " directory that is given is synced and survives the server (default: the run directory)",
        unit="DIR",
        basic=True,
    )
    no_journal: bool = flag(False, "keep no journal: requests are lost if the scheduler dies")
    resume: bool = flag(False, "continue the requests that an earlier run left in --journal")

    def validate(self) -> None:
        """Raise ConfigError for the first flag that cannot work."""
        check_positive(self, "max_batch_size", "prefill_max_batch_size", "prefill_max_tokens")
        check_positive(self, "max_running_requests", "max_num_partial_prefills")
        check_positive(self, "max_queued_requests", "max_requests_per_client")
        check_positive(self, "pack_lookahead", "pack_fifo_every", "priority_preemption_threshold")
        if self.itl_target is not None and not self.itl_target > 0:
            raise ConfigError(
                f"itl_target is {self.itl_target}: it must be milliseconds above 0; leave it out"
                " for no bound"
            )
        if not 1 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"num_speculative_tokens is {self.num_speculative_tokens}: it must be 1 to"
                f" {MAX_SPECULATIVE_TOKENS}; --speculative-method none guesses nothing"
            )
        if self.batch_concurrency_beside < 0:
            raise ConfigError(
                f"batch_concurrency_beside is {self.batch_concurrency_beside}: it must be 0 or more"
            )
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
        """Raise ConfigError for flags that contradict each other or have no effect."""
        mode = self.batch_mode
        if self.batching == "static" and mode not in (SchedulerArgs().batch_mode, "prefill-first"):
            raise ConfigError(
                "--batching static prefills a batch and then decodes it: it contradicts"
                f" --batch-mode {mode}"
            )
        if self.resume and not self.journal:
            raise ConfigError("--resume goes on with a journal: say which with --journal DIR")
        if self.no_journal and self.journal:
            raise ConfigError("--no-journal contradicts --journal: leave one out")
        if self.disable_radix_cache and self.schedule_policy in ("lpm", "dfs-weight"):
            raise ConfigError(
                f"--schedule-policy {self.schedule_policy} orders by cached prefixes:"
                " it needs the prefix cache, leave --disable-radix-cache out"
            )
        if self.fair_tenants and self.fair_clients:
            raise ConfigError(
                "--fair-clients shares between clients, and --keys, --tenants-by and --fair-tenants"
                " between tenants: leave --fair-clients out"
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

    @property
    def prefill_width(self) -> int:
        """Number of waiting requests that one step may admit."""
        return self.prefill_max_batch_size or self.max_batch_size

    @property
    def is_fair(self) -> bool:
        """Whether clients or tenants have turns."""
        return self.fair_clients or self.fair_tenants

    @property
    def mode(self) -> str:
        """--batch-mode, or prefill-first for static batching."""
        return "prefill-first" if self.batching == "static" else self.batch_mode

    @property
    def measures_chunks(self) -> bool:
        """Whether the worker measures the number of prompt tokens that a step should hold."""
        return self.chunked_prefill_size is None

    def prefill_budget(self, measured: int) -> int:
        """Return the number of prompt tokens that one step may hold.

        Args:
            measured: smallest number of tokens that keeps the worker busy.
        """
        chunk = self.chunk_size(measured)
        return self.prefill_max_tokens if chunk is None else min(chunk, self.prefill_max_tokens)

    def prefill_slack(self, measured: int) -> int:
        """Return the number of prompt tokens that the last prefill step may hold beyond the budget.

        It is half a step, since a smaller step of its own would not keep the worker busy.
        """
        if not self.measures_chunks:
            return 0
        budget = self.prefill_budget(measured)
        return min(budget // 2, self.prefill_max_tokens - budget)

    def longest_chunk(self, measured: int) -> int:
        """Return the number of tokens that a step may compute of a single prompt.

        It may exceed the budget: with several prompts the first ones would wait for the last, but
        a single one delays only itself.
        """
        budget = self.prefill_budget(measured)
        if not self.measures_chunks:
            return budget
        return min(max(budget, MIN_SINGLE_CHUNK_TOKENS), self.prefill_max_tokens)

    def chunk_size(self, measured: int) -> int | None:
        """Return the number of tokens of the largest chunk; None if prompts are never cut."""
        if self.chunked_prefill_size is None:
            return measured
        return None if self.chunked_prefill_size == -1 else self.chunked_prefill_size
