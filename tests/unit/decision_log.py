"""A log of what a scheduler decides, as a hash and as lines of text.

A line has the facts of one message to the worker or to the detokenizer, by their meaning: times,
slots, tokens and pages, never the layout of a frame or the name of a class. So the hash stays as it
is when a private message gets a field, loses one, or is renamed.
"""

import hashlib
import json
from collections.abc import Callable
from typing import Any

import msgspec

from quadriga.wire import to_detok, worker
from quadriga.wire.packing import unpack_ids
from quadriga.wire.worker import LoadPages, NewSlot, StepPlan, StorePages


class DecisionLog:
    """Hash the facts of messages in the order in which they are sent.

    Attributes:
        num_messages: messages up to now.
        num_plans: step plans among them.
    """

    def __init__(self, write_line: Callable[[str], object] | None = None) -> None:
        """Start an empty log.

        Args:
            write_line: called with the line of each message.
        """
        self.num_messages = 0
        self.num_plans = 0
        self._hash = hashlib.sha256()
        self._write_line = write_line

    def observe(self, message: msgspec.Struct, at_us: int = 0) -> None:
        """Add a message that is sent at a time; a plan that is sent later is another decision."""
        line = f"{at_us} {json.dumps(facts_of(message))}"
        self._hash.update(line.encode() + b"\n")
        self.num_messages += 1
        self.num_plans += isinstance(message, StepPlan)
        if self._write_line is not None:
            self._write_line(f"{self.num_messages} {line}")

    @property
    def summary(self) -> dict[str, Any]:
        """Return what is committed of a log: its hash, and its number of plans and messages."""
        return {
            "sha256": self._hash.hexdigest(),
            "plans": self.num_plans,
            "messages": self.num_messages,
        }


def facts_of(message: Any) -> dict[str, Any]:
    """Return what a message says, in a form for JSON."""
    match message:
        case StepPlan():
            return _plan(message)
        case worker.CompileGrammar():
            return {"compile": message.grammar.key.hex(), "text": message.grammar.text}
        case worker.ForgetGrammar():
            return {"forget grammar": message.key.hex()}
        case StorePages():
            return {"store": _ids(message.pages), "hashes": message.hashes.hex()}
        case LoadPages():
            return {"load": _ids(message.pages), "hashes": message.hashes.hex()}
        case to_detok.StepOutput():
            return _output(message)
        case to_detok.InfoReply():
            return {"info": message.info.request_id, "values": as_json(message.info.values)}
        case to_detok.ProgressReply():
            values = msgspec.to_builtins(message.progress.values)
            return {"progress": message.progress.request_id, "values": values}
        case to_detok.HandedBack() | to_detok.Withdrawn() | to_detok.ForgetStreams():
            return {KINDS[type(message)]: message.seqs}
        case to_detok.KnownRequests():
            return {"known": [[r.client.hex(), r.request_id] for r in message.requests]}
    return {"kind": KINDS[type(message)]}


KINDS: dict[type, str] = {
    worker.ResetWorker: "reset worker",
    worker.StopWorker: "stop worker",
    to_detok.HandedBack: "handed back",
    to_detok.Withdrawn: "withdrawn",
    to_detok.ForgetStreams: "forget streams",
    to_detok.SchedulerRestarted: "scheduler restarted",
    to_detok.LiveFrame: "live",
    to_detok.Drained: "drained",
    to_detok.StopDetok: "stop detokenizer",
}


def _ids(data: bytes) -> list[int]:
    return unpack_ids(data).tolist()


def _plan(plan: StepPlan) -> dict[str, Any]:
    slots = _ids(plan.slots)
    return {
        "step": plan.step,
        "mode": plan.forward_mode,
        "rows": list(zip(slots, _ids(plan.num_tokens), strict=True)),
        "guesses": _ids(plan.num_guesses),
        "groups": [group.hex() for group in plan.groups],
        "new": [_new_slot(new) for new in plan.new],
        "released": _ids(plan.released),
        "grown": _ids(plan.grown),
    }


def _new_slot(new: NewSlot) -> dict[str, Any]:
    rules = None if new.rules is None else as_json(set_fields(new.rules))
    return {
        "slot": new.slot,
        "tokens": _ids(new.token_ids),
        "computed": new.computed,
        "pages": _ids(new.pages),
        "sampling": [new.temperature, new.top_k, new.top_p, new.seed, rules],
    }


def _output(output: to_detok.StepOutput) -> dict[str, Any]:
    logprobs = output.logprobs
    return {
        "ended": output.time,
        "opened": [_opening(opening) for opening in output.opened],
        "tokens": list(zip(output.seqs, _ids(output.token_ids), strict=True)),
        "logprobs": None if logprobs is None else as_json(set_fields(logprobs)),
        "closed": [_closing(closing) for closing in output.closed],
        "replayed": [
            [
                _opening(replay.opening),
                _ids(replay.token_ids),
                [as_json(set_fields(block)) for block in replay.logprobs],
                None if replay.closing is None else _closing(replay.closing),
            ]
            for replay in output.replayed
        ],
        "waiting": output.waiting,
        "wait_s": output.wait_s,
    }


def _opening(opening: to_detok.StreamStart) -> Any:
    return as_json(set_fields(opening))


def _closing(closing: to_detok.StreamEnd) -> Any:
    return as_json(set_fields(closing))


def set_fields(message: msgspec.Struct) -> dict[str, Any]:
    """Return the fields that have another value than their default, by name."""
    return {
        field.name: value
        for field in msgspec.structs.fields(message)
        if (value := getattr(message, field.name)) != _default(field)
    }


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def as_json(value: Any) -> Any:
    """Return a value in a form that JSON has and that a reader understands.

    Bytes become text where they are printable, else a list of int32 where their length allows it,
    else hex digits; a struct becomes a map of the fields that are set.
    """
    if isinstance(value, msgspec.Struct):
        return as_json(set_fields(value))
    if isinstance(value, bytes):
        if value.isascii() and value.decode("ascii").isprintable():
            return value.decode("ascii")
        return value.hex() if len(value) % 4 else _ids(value)
    if isinstance(value, dict):
        return {str(key): as_json(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(element) for element in value]
    return value
