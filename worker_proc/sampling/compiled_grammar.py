"""A grammar that slots can have, with the reasoning before it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quadriga.sampling.grammar import compile_grammar
from quadriga.wire.messages.grammar import GrammarForm, ThinkingForm
from worker_proc.attention.base import Ints
from worker_proc.sampling.grammar_mask import SlotConstraint, SlotGrammar
from worker_proc.sampling.thinking import GrammarAfterThinking, ThinkingMarks, thinking_marks

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar, the reasoning before it, or both.

    Attributes:
        matcher: In its initial state; slots get copies. None: what follows the reasoning is free.
        thinking: The reasoning and its marks; None: the grammar begins with the answer.
    """

    matcher: "LLMatcher | None"
    thinking: tuple[ThinkingForm, ThinkingMarks] | None = None

    def begin(self, stop_ids: Ints, generated: Ints, jump_forward: bool) -> SlotConstraint:
        """Return the state of a slot after the tokens generated so far.

        Args:
            stop_ids: Tokens that end the request.
            generated: `[tokens]` generated before, if the request was retracted or resent.
            jump_forward: Append forced tokens without sampling them.
        """
        if self.thinking is not None:
            form, marks = self.thinking
            return GrammarAfterThinking(
                form, marks, self.matcher, stop_ids, generated, jump_forward
            )
        assert self.matcher is not None
        return SlotGrammar(self.matcher.deep_copy(), stop_ids, generated, jump_forward)


def compile_form(vocabulary: "LLTokenizer", form: GrammarForm) -> CompiledGrammar:
    """Return a grammar for slots.

    Raises:
        ValueError: The grammar is wrong, the model's tokens cannot end the reasoning, or nothing
            begins it.
    """
    thinking, text = form.parts()
    if thinking is None:
        return CompiledGrammar(compile_grammar(vocabulary, text))
    matcher = compile_grammar(vocabulary, text) if text else None
    marks = thinking_marks(thinking.start, thinking.end, vocabulary, matcher is not None)
    if not thinking.is_inside and not marks.start_ids:
        raise ValueError("no text begins the reasoning, and the prompt does not end within it")
    return CompiledGrammar(matcher, (thinking, marks))
