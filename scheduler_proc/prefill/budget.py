"""How many prompt tokens a step computes, and where prompts are cut."""

from quadriga.config.scheduler_args import SchedulerArgs
from scheduler_proc.state.plan import Capacity


class PrefillBudget:
    """The prompt tokens of a step.

    Attributes:
        tokens: number of prompt tokens that a step computes.
        stretched_tokens: the number for a step that computes all prompts there are with it.
        chunk: longest part of one prompt in a step.
        cuts_prompts: prompts may be computed in parts.
        longest: largest number of tokens of a prompt in a step; 0: no limit.
    """

    def __init__(self, args: SchedulerArgs, capacity: Capacity) -> None:
        self.tokens = args.prefill_budget(capacity.prefill_tokens)
        self.stretched_tokens = self.tokens + args.prefill_slack(capacity.prefill_tokens)
        self.chunk = args.longest_chunk(capacity.prefill_tokens)
        self.cuts_prompts = args.chunk_size(capacity.prefill_tokens) is not None
        self.longest = max(self.stretched_tokens, self.chunk) if self.cuts_prompts else 0
        self._page_size = capacity.page_size

    def stretched(self, budget: int, wanted: int) -> int:
        """Return a budget for all that is wanted, where that is little more than the budget."""
        slack = self.stretched_tokens - self.tokens
        return wanted if budget < wanted <= budget + slack else budget

    def num_tokens_for(self, uncached: int, budget: int, has_prefills: bool) -> int:
        """Return how many of a waiting prompt's uncached tokens a step can take; 0 for none.

        The first prompt of a step is cut to the longest chunk, or goes alone where prompts are not
        cut; later ones are cut where a page ends.

        Args:
            uncached: number of tokens to compute.
            budget: number of tokens that are left for prompts.
            has_prefills: the step has other prompts.
        """
        if uncached <= budget:
            return uncached
        if not has_prefills:
            return min(uncached, self.chunk) if self.cuts_prompts else uncached
        return budget // self._page_size * self._page_size if self.cuts_prompts else 0
