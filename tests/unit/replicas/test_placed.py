"""What the router has to know of a request."""

from quadriga.server.prefix_blocks import block_hashes
from quadriga.wire.packing import pack_ids
from tests.unit.simulation import submit
from tokenizer_proc.replicas.placed import PlacedRequest
from tokenizer_proc.replicas.router import Prompt


def test_given_tokens_count_for_the_choice_of_a_replica_as_the_prompt_does() -> None:
    given = list(range(10, 40))
    message = submit("r", list(range(20)), 64, first_token_ids=given)
    placed = PlacedRequest((b"c", "r"), message)
    expected = block_hashes(pack_ids([*range(20), *given]), 16, b"")
    assert len(expected) > len(block_hashes(message.prompt_ids, 16, b""))
    assert placed.prompt(16) == Prompt(50, expected, 1)
    placed.choice(0).token_ids.extend([*given, 1, 2])  # as its replica has said
    assert placed.prompt(16) == Prompt(52, expected, 1, goes_on=True)
