"""Receipts: what an answer is a function of, and a hash of the answer."""

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from quadriga.sampling.params import SamplingParams
from quadriga.wire.packing import pack_floats, pack_ids

NUM_DIGITS = 32
# Parameters that change no token: what comes back beside the tokens, and the choices.
NOT_HASHED = ("seed", "n", "logprobs", "prompt_logprobs", "logprob_token_ids", "text_lengths",
              "skip_special_tokens")  # fmt: skip


class Receipt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an answer is a function of, and a hash of its tokens.

    Two answers with equal receipts, but for the id, have the same tokens, or the same vector. Where
    kernels are deterministic (docs/engineering/equal-bits.md), the fields from `fingerprint` to
    `prompt` decide `tokens` and `vector`.

    Attributes:
        request_id: of the request, which `quadriga replay` takes.
        model: name of the model.
        fingerprint: of the model's configuration, tokenizer and weights.
        kernels: what computes, its version, and the number formats.
        seed: of the choice; 0 of a vector, which nothing is drawn for.
        params: hash of the other parameters, as they were sent.
        prompt: hash of the prompt's token ids.
        tokens: hash of the generated token ids.
        vector: hash of the vector, of a request for one.
        adapter: id of the adapter that has answered, a hash of its content; "": none has.
    """

    request_id: str
    model: str
    fingerprint: str
    kernels: str
    seed: int
    params: str
    prompt: str
    tokens: str
    vector: str = ""
    adapter: str = ""


def hash_ids(ids: Sequence[int]) -> str:
    """Return the first 32 hexadecimal digits of the SHA-256 of ids, int32 little-endian."""
    return _digits(pack_ids(ids))


def hash_vector(vector: "array[float]") -> str:
    """Return the same of a vector, float32 little-endian."""
    return _digits(pack_floats(vector))


def hash_params(params: SamplingParams) -> str:
    """Return a hash of the parameters that change tokens, without the seed."""
    values: dict[str, Any] = msgspec.to_builtins(params)
    kept = {name: value for name, value in values.items() if name not in NOT_HASHED}
    return _digits(msgspec.json.encode(kept, order="sorted"))


def _digits(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:NUM_DIGITS]
