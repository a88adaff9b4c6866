"""What a forecast plays with: prompts and steps that count, and compute nothing."""

from array import array
from dataclasses import dataclass

from scheduler_proc.state.request import Request


@dataclass(slots=True, eq=False)
class PlayedPrompt:
    """A request whose prompt waits or is partly computed, in a possible future.

    The attributes that a request has mean what they mean there.

    Attributes:
        num_decode_steps: decode steps that it has after its prompt, in the future that is played.
        num_held_tokens: tokens of KV that it is given when it is admitted, and frees at its end,
            with those that it is expected to generate.
        leader: prompt ahead of it that computes its first `num_led_tokens` tokens; None: none does.
        held_by: prompt under way that goes first, if one was found.
        admitted_s: seconds until it is admitted; None: it is not yet.
        first_token_s: seconds until its first token; None: it has none yet.
    """

    seq: int
    due_at: float
    priority: int
    is_background: bool
    tokens: "array[int]"
    cache_salt: bytes
    wants_prompt_logprobs: bool
    num_known_tokens: int
    num_computed_tokens: int
    num_decode_steps: int = 0
    num_held_tokens: float = 0.0
    leader: "PlayedPrompt | None" = None
    num_led_tokens: int = 0
    held_by: "PlayedPrompt | None" = None
    admitted_s: float | None = None
    first_token_s: float | None = None

    @classmethod
    def of(cls, request: Request, num_computed: int) -> "PlayedPrompt":
        """Return a request's prompt, of which so many tokens are computed or cached."""
        return cls(
            seq=request.seq,
            due_at=request.due_at,
            priority=request.priority,
            is_background=request.is_background,
            tokens=request.tokens,
            cache_salt=request.cache_salt,
            wants_prompt_logprobs=request.wants_prompt_logprobs,
            num_known_tokens=request.num_known_tokens,
            num_computed_tokens=num_computed,
        )

    @property
    def num_uncomputed_tokens(self) -> int:
        """Number of tokens that are not computed yet."""
        return self.num_known_tokens - self.num_computed_tokens


class PlayedStep:
    """The rows of a step: how many decode, and how many tokens of which prompts are computed.

    Attributes:
        num_decodes: number of decode rows.
        requests: the prompts.
        num_tokens: number of tokens that each of them computes.
        num_prompt_tokens: their sum.
        num_pairs: pairs of a prompt token and a token that it attends to.
    """

    def __init__(self, num_decodes: int) -> None:
        self.num_decodes = num_decodes
        self.requests: list[PlayedPrompt] = []
        self.num_tokens: list[int] = []
        self.num_prompt_tokens = 0
        self.num_pairs = 0

    @property
    def num_prompts(self) -> int:
        """Number of prompts."""
        return len(self.requests)

    def add(self, prompt: PlayedPrompt, count: int) -> None:
        """Let the step compute the next `count` tokens of a prompt."""
        self.num_pairs += count * prompt.num_computed_tokens + count * (count + 1) // 2
        self.num_prompt_tokens += count
        prompt.num_computed_tokens += count
        if prompt in self.requests:
            self.num_tokens[self.requests.index(prompt)] += count
        else:
            self.requests.append(prompt)
            self.num_tokens.append(count)
