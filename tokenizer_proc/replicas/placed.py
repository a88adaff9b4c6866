"""A request at its replica, with the tokens that its client may have."""

from array import array
from dataclasses import dataclass, field

from quadriga.prefix_blocks import block_hashes
from quadriga.wire.messages.arrays import num_ids, pack_ids
from quadriga.wire.messages.to_scheduler import ChoiceProgress, MovedSubmit, Submit
from tokenizer_proc.replicas.router import Prompt

Name = tuple[bytes, str]


@dataclass(slots=True)
class PlacedChoice:
    """A choice that is open at a replica.

    Attributes:
        seq: the scheduler's number; -1 while it is not known.
        token_ids: every token that was generated. It is noted here before its text goes out.
        first_token_at: Unix seconds; 0.0 without a token.
    """

    seq: int = -1
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    first_token_at: float = 0.0


@dataclass(slots=True, eq=False)
class PlacedRequest:
    """A request from its Submit to the end of its last choice.

    Attributes:
        submit: None where its client has not sent it again to a frontend that was restarted.
        replica: None while it waits for a replica.
        choices: by index, as far as anything is known of them.
        ended: indexes of choices whose ends were passed on.
        aborted_by: as in AbortRequest; "" if it was not aborted.
        num_losses: number of replicas that were lost while they had it.
        is_moving: it was at a replica before.
    """

    name: Name
    submit: Submit | None = None
    replica: int | None = None
    choices: dict[int, PlacedChoice] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    aborted_by: str = ""
    num_losses: int = 0
    is_moving: bool = False

    def choice(self, index: int) -> PlacedChoice:
        """Return what is known of a choice."""
        return self.choices.setdefault(index, PlacedChoice())

    @property
    def has_ended(self) -> bool:
        """Whether every choice has ended, or all that are known of a request without a Submit."""
        if self.submit is None:
            return not self.choices
        return len(self.ended) >= self.submit.params.n

    def prompt(self, block_tokens: int) -> Prompt:
        """Return what the router has to know of the request."""
        submit = self.submit
        if submit is None:
            return Prompt(0, [], max(1, len(self.choices)))
        num_open = submit.params.n - len(self.ended)
        hashes = []
        if submit.params.prompt_logprobs is None:
            hashes = block_hashes(submit.prompt_ids, block_tokens, submit.cache_salt.encode())
        num_generated = sum(len(choice.token_ids) for choice in self.choices.values())
        return Prompt(num_ids(submit.prompt_ids) + num_generated, hashes, num_open)

    def leave_replica(self) -> None:
        """Take in that its replica has it no more."""
        self.replica, self.is_moving = None, True
        for choice in self.choices.values():
            choice.seq = -1

    def next_submit(self) -> Submit:
        """Return the request as its next replica gets it."""
        assert self.submit is not None
        return self.moved() if self.is_moving else self.submit

    def moved(self) -> MovedSubmit:
        """Return the request as it goes on at another scheduler.

        It is computed from its first token there if it asks for logprobs, which are not noted here.
        """
        submit = self.submit
        assert submit is not None
        params = submit.params
        begins_anew = params.num_top_logprobs is not None or params.prompt_logprobs is not None
        progress = [
            ChoiceProgress(index)
            if begins_anew or (known := self.choices.get(index)) is None
            else ChoiceProgress(index, pack_ids(known.token_ids), known.first_token_at)
            for index in range(params.n)
            if index not in self.ended
        ]
        was_admitted = any(choice.first_token_at for choice in self.choices.values())
        fields = {name: getattr(submit, name) for name in Submit.__struct_fields__}
        fields |= {"frontend_retry": True, "client_retry": False}
        if was_admitted:
            fields["queue_deadline"] = None
        return MovedSubmit(**fields, progress=progress, num_losses=self.num_losses)
