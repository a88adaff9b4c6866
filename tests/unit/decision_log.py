"""A log of what a scheduler decides, as a hash and as lines of text.

A line is one fact: a slot that is released or filled, a page, a row of a step, a token, an end. Its
words and the order of its values are chosen here. So the hash stays as it is when private messages
are renamed, merged or split, and when they get fields that decide nothing.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from quadriga.wire import to_detok, worker
from quadriga.wire.logprobs import LogprobBlock, SampledLogprobs
from quadriga.wire.packing import unpack_floats, unpack_ids

Fact = tuple[Any, ...]

WORKER, DETOK = "worker", "detok"
INFO_FIGURES = ("running", "waiting", "waiting_for_grammar", "retractions", "new_token_ratio",
                "steps", "prefill_steps", "pages_free", "pages_cached", "pages_held",
                "flushed_pages")  # fmt: skip
"""The values of an Info that follow from decisions. Others may come and go."""


class DecisionLog:
    """Hash the facts that are sent on each link in their order.

    The links are apart: no receiver can see which of two messages on different links was first.

    Attributes:
        num_facts: facts up to now.
        num_plans: step plans among the messages that they come from.
    """

    def __init__(self, write_line: Callable[[str], object] | None = None) -> None:
        """Start an empty log.

        Args:
            write_line: called with the line of each fact.
        """
        self.num_facts = 0
        self.num_plans = 0
        self._hashes = {link: hashlib.sha256() for link in (WORKER, DETOK)}
        self._write_line = write_line

    def observe(self, message: Any, at_us: int = 0) -> None:
        """Add a message that is sent at a time; a plan that is sent later is another decision."""
        link = WORKER if isinstance(message, worker.WorkerMessage) else DETOK
        for fact in facts_of(message):
            line = f"{at_us} {json.dumps(fact)}"
            self._hashes[link].update(line.encode() + b"\n")
            self.num_facts += 1
            if self._write_line is not None:
                self._write_line(f"{link} {line}")
        self.num_plans += isinstance(message, worker.StepPlan)

    @property
    def summary(self) -> dict[str, Any]:
        """Return what is committed of a log: its hash, and its number of plans and facts."""
        hashes = "".join(one.hexdigest() for one in self._hashes.values())
        return {
            "sha256": hashlib.sha256(hashes.encode()).hexdigest(),
            "plans": self.num_plans,
            "facts": self.num_facts,
        }


def facts_of(message: Any) -> Iterator[Fact]:
    """Yield what a message decides, in the order in which its receiver applies it.

    Raises:
        TypeError: nothing is known of messages of this class.
    """
    match message:
        case worker.StepPlan():
            yield from _plan(message)
        case worker.CompileGrammar():
            yield "compile", message.grammar.key.hex(), message.grammar.text
        case worker.ForgetGrammar():
            yield "forget grammar", message.key.hex()
        case worker.LoadAdapter():
            yield "load adapter", msgspec.to_builtins(message.adapter), message.place
        case worker.ForgetAdapter():
            yield "forget adapter", message.place
        case worker.EvictAdapter():
            yield "evict adapter", message.id
        case worker.StorePages():
            yield "store pages", _ids(message.pages), message.hashes.hex()
        case worker.LoadPages():
            ahead = ["ahead"] if message.is_ahead else []
            yield "load pages", _ids(message.pages), message.hashes.hex(), *ahead
        case worker.ResetWorker():
            yield ("reset worker",)
        case worker.StopWorker():
            yield ("stop worker",)
        case to_detok.StepOutput():
            yield from _output(message)
        case to_detok.InfoReply():
            values = message.info.values
            figures = [[name, values[name]] for name in INFO_FIGURES if name in values]
            yield "info", _name(message.client), message.info.request_id, figures
        case to_detok.ProgressReply():
            progress = message.progress
            places = [[one.state.value, one.place, one.wait_s, one.num_computed_tokens,
                       one.num_prompt_tokens] for one in progress.values]  # fmt: skip
            yield "progress", _name(message.client), progress.request_id, places
        case to_detok.HandedBack():
            yield "hand back", message.seqs
        case to_detok.Withdrawn():
            yield "withdraw", message.seqs
        case to_detok.ForgetStreams():
            yield "forget streams", message.seqs
        case to_detok.KnownRequests():
            adapters = [msgspec.to_builtins(one.adapter) for one in message.requests]
            names = [[_name(one.client), one.request_id] for one in message.requests]
            yield "known", names, adapters
        case to_detok.SchedulerRestarted():
            yield ("forget every stream",)
        case to_detok.LiveFrame():
            yield ("live",)
        case to_detok.Drained():
            yield ("drained",)
        case to_detok.StopDetok():
            yield ("stop detokenizer",)
        case _:
            raise TypeError(f"what does {type(message).__name__} decide?")


def _plan(plan: worker.StepPlan) -> Iterator[Fact]:
    slots, num_tokens = _ids(plan.slots), _ids(plan.num_tokens)
    num_guesses = _ids(plan.num_guesses) or [0] * len(slots)
    groups = [group.hex() for group in plan.groups] or [""] * len(plan.new)
    yield "step", plan.step, plan.forward_mode
    for slot in _ids(plan.released):
        yield "release", slot
    for new, group in zip(plan.new, groups, strict=True):
        tokens, pages = _ids(new.token_ids), _ids(new.pages)
        sampling = [new.temperature, new.top_k, new.top_p, new.seed]
        yield "fill", new.slot, tokens, new.computed, pages, sampling, _rules(new.rules), group
        if new.adapter != worker.NO_ADAPTER:
            yield "adapter of", new.slot, new.adapter
        if new.pooling is not None:
            yield "vector of", new.slot, msgspec.to_builtins(new.pooling)
    grown = _ids(plan.grown)
    for slot, page in zip(grown[::2], grown[1::2], strict=True):
        yield "page", slot, page
    for row in zip(slots, num_tokens, num_guesses, strict=True):
        yield "row", *row


def _rules(rules: worker.SlotSamplingParams | None) -> list[Any] | None:
    if rules is None:
        return None
    wanted: Any = rules.logprobs
    if isinstance(wanted, worker.WantedLogprobs):
        wanted = [wanted.num_top, _ids(wanted.token_ids)]
    return [
        rules.num_prompt,
        rules.min_p,
        [rules.repetition_penalty, rules.frequency_penalty, rules.presence_penalty],
        [_ids(rules.bias_ids), unpack_floats(rules.bias).tolist()],
        _ids(rules.allowed_ids),
        [_ids(word) for word in rules.bad_words],
        [rules.min_new_tokens, _ids(rules.stop_ids)],
        [wanted, rules.prompt_logprobs],
        [rules.grammar.hex(), rules.jumps],
    ]


def _output(output: to_detok.StepOutput) -> Iterator[Fact]:
    if not (output.opened or output.seqs or output.closed or output.replayed):
        return  # it has what the frontend has to know of the replica
    yield "output", output.time, output.waiting, output.wait_s
    for replay in output.replayed:
        logprobs = [one for block in replay.logprobs for one in _logprobs(block)]
        end = None if replay.closing is None else _closing(replay.closing)
        yield "replay", _opening(replay.opening), _ids(replay.token_ids), logprobs, end
    for opening in output.opened:
        yield "open", *_opening(opening)
    logprobs_of = _logprobs_by_row(output.logprobs)
    for row, (seq, token) in enumerate(zip(output.seqs, _ids(output.token_ids), strict=True)):
        yield "token", seq, token, logprobs_of.get(row)
    for closing in output.closed:
        yield "end", *_closing(closing)


def _opening(opening: to_detok.StreamStart) -> list[Any]:
    prompt = opening.prompt
    return [
        [opening.seq, _name(opening.client), opening.request_id, opening.index],
        [opening.stream, opening.skip_special_tokens, opening.text_lengths],
        [opening.stop_strings, opening.stop_regexes, opening.keeps_stop, opening.min_new_tokens],
        opening.logprobs,
        prompt
        and [
            _ids(prompt.token_ids),
            prompt.width,
            [one for block in prompt.blocks for one in _logprobs(block)],
        ],
        _ids(opening.prompt_end),
        *([_ids(opening.given_ids)] if opening.given_ids else []),
    ]


def _closing(closing: to_detok.StreamEnd) -> list[Any]:
    error = closing.error
    vector = [] if closing.vector is None else [closing.vector.hex()]
    return [
        [closing.seq, _name(closing.client), closing.request_id, closing.index],
        [closing.finish_reason, closing.matched_stop, *vector],
        error and [error.code, error.message, error.field, error.retry_after],
        [closing.prompt_tokens, closing.cached_tokens],
        [closing.received_at, closing.tokenized_at, closing.admitted_at, closing.first_token_at],
    ]


def _logprobs_by_row(sampled: SampledLogprobs | None) -> dict[int, list[Any]]:
    if sampled is None:
        return {}
    return dict(zip(_ids(sampled.rows), _logprobs(sampled.block), strict=True))


def _logprobs(block: LogprobBlock) -> list[list[Any]]:
    """Return log-probability, ids and log-probabilities of the likeliest ones for each token."""
    values = unpack_floats(block.values).tolist()
    ids, top_values = _ids(block.top_ids), unpack_floats(block.top_values).tolist()
    parts = [slice(row * block.width, (row + 1) * block.width) for row in range(len(values))]
    return [[value, ids[part], top_values[part]] for value, part in zip(values, parts, strict=True)]


def _ids(data: bytes) -> list[int]:
    return unpack_ids(data).tolist()


def _name(client: bytes) -> str:
    return client.decode("latin-1")
