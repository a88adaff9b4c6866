"""A request from its arrival to what the scheduler is told of it."""

from array import array
from dataclasses import dataclass

from quadriga import clock
from quadriga.config import FrontDoorArgs
from quadriga.grammar import without_grammar
from quadriga.messages.arrays import pack_ids
from quadriga.messages.grammar import GrammarForm
from quadriga.messages.public import Generate
from quadriga.messages.to_scheduler import Submit
from quadriga.model_source import ModelFiles
from tokenizer_proc import requests
from tokenizer_proc.encode import Encoder
from tokenizer_proc.outstanding import Open
from tokenizer_proc.sampling_defaults import sampling_defaults


@dataclass(slots=True)
class Arrival:
    """A request that is being worked on. size: of its message, in bytes. received: Unix seconds."""

    client: bytes
    message: Generate
    size: int
    received: float
    open: Open
    grammar: GrammarForm | None = None


class Submissions:
    """Fills in what a client left open: sampling parameters, deadlines, how much it may have."""

    def __init__(self, args: FrontDoorArgs, model: ModelFiles, encoder: Encoder) -> None:
        self._args = args
        self._model = model
        self._encoder = encoder
        self._defaults = sampling_defaults(args.sampling_defaults, model.generation_config)

    def make(self, arrival: Arrival, ids: "array[int]") -> Submit:
        """ids: of its prompt. PromptTooLong where they do not fit and may not be cut."""
        args, message, received = self._args, arrival.message, arrival.received
        truncate = message.truncate_prompt
        if truncate is None:
            truncate = args.allow_auto_truncate
        params = message.params.filled(self._defaults)
        ids, params = requests.fit(ids, params, self._model, truncate, message.clamp_max_new_tokens)
        if arrival.grammar is not None:
            params = without_grammar(params)
        return Submit(
            client=arrival.client,
            request_id=message.request_id,
            prompt_ids=pack_ids(ids),
            params=params,
            stream=message.stream,
            received=received,
            tokenized=clock.now(),
            priority=message.priority,
            queue_deadline=requests.deadline(received, message.queue_timeout, args.queue_timeout),
            deadline=requests.deadline(received, message.timeout, args.request_timeout),
            bad_words=self._encoder.bad_words(params.bad_words) if params.bad_words else [],
            grammar=arrival.grammar,
            resent=arrival.open.resent,
        )
