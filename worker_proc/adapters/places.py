"""Where an adapter's matrices belong in a model.

`Places` finds the rows of a model's matrices by the names that the checkpoint has for them, and
`Assembly` puts changes together there: fused, permuted and transposed as the checkpoint's tensors
are, and cut into the part of one rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quadriga.errors import ModelError
from quadriga.server.models.families.decoder_config import DecoderConfig
from worker_proc.adapters.change import Adapter, LinearChange, Part
from worker_proc.loading.sharding import WHOLE, TPRank
from worker_proc.models.base import Model, checkpoint_parts
from worker_proc.models.decoder import Decoder
from worker_proc.models.layers import Linear, Parallel


@dataclass(frozen=True, slots=True)
class Place:
    """The rows of a matrix that one matrix of the checkpoint fills.

    Attributes:
        number: of the matrix, in `Model.matrices`.
        first: its first row, in the part of this rank.
        outputs, inputs: the whole size of the checkpoint's matrix, over all ranks.
        parallel: how the matrix is split over the ranks.
        has_bias: the matrix has a bias.
    """

    number: int
    first: int
    outputs: int
    inputs: int
    parallel: Parallel
    has_bias: bool


@dataclass(frozen=True, slots=True)
class Places:
    """The places of all matrices of a model. It holds no weights, which an engine may take away.

    Attributes:
        config: of the model.
        rank: this process among those that share the model.
        by_name: by the name in the checkpoint, without `.weight`; a matrix that stays whole in the
            model is not there by the name of the fused tensor, but of its parts.
        outputs: rows of each matrix in the part of this rank, by its number.
        embedding: of the tokens.
        head: of the logits: the embedding's, where it is the head; None: there are none.
    """

    config: DecoderConfig
    rank: TPRank
    by_name: dict[str, Place]
    outputs: tuple[int, ...]
    embedding: Place
    head: Place | None

    @classmethod
    def of(cls, model: Model, rank: TPRank = WHOLE) -> "Places":
        """Return the places of a model, before an engine takes its weights."""
        assert isinstance(model, Decoder)
        matrices, config = model.matrices(), model.config
        numbers = {matrix: number for number, matrix in enumerate(matrices)}
        by_name = {}
        for name, rows in model.checkpoint_rows().items():
            matrix = rows.matrix
            parallel = matrix.parallel if isinstance(matrix, Linear) else Parallel.NONE
            by_name[name] = Place(
                numbers[matrix],
                rows.first,
                rows.count * (rank.count if parallel is Parallel.COLUMN else 1),
                matrix.weight.shape[1] * (rank.count if parallel is Parallel.ROW else 1),
                parallel,
                isinstance(matrix, Linear) and matrix.bias is not None,
            )
        embedding = by_name[config.name("embedding")]
        return cls(
            config,
            rank,
            by_name,
            tuple(len(matrix.weight) for matrix in matrices),
            embedding,
            by_name.get(config.name("head"), embedding) if model.has_head else None,
        )

    def parts(self, name: str, tensor: Tensor, kind: str = "weight") -> list[tuple[Place, Tensor]]:
        """Return the places that a matrix of the checkpoint fills, each with its rows of a tensor.

        Args:
            name: as it is stored, without `.weight`; of the embedding, it is the place of its rows
                in the logits, if it is the head.
            tensor: [outputs, …] for a weight, [outputs] for a bias.
            kind: "weight" or "bias".

        Returns:
            Nothing if the model has no such matrix.
        """
        if kind == "weight" and self.config.transposed:
            tensor = tensor.t() if self._is_in_layers(name) else tensor
        found = []
        for part, rows in checkpoint_parts(self.config, f"{name}.{kind}", tensor):
            place = self.by_name.get(part.removesuffix(f".{kind}"))
            if place is None:
                return []
            assert isinstance(rows, Tensor)
            found.append((place, rows))
        return found

    def _is_in_layers(self, name: str) -> bool:
        for part in self.config.removed:
            name = name.replace(part, "")
        return name.startswith(f"{self.config.name('layers')}.")


class Assembly:
    """Puts the changes of an adapter together for one rank."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._downs: dict[int, list[Tensor]] = {}
        self._parts: dict[int, list[Part]] = {}
        self._gains: dict[int, Tensor] = {}
        self._shifts: dict[int, Tensor] = {}
        self._embedding: Tensor | None = None

    def add(self, places: list[tuple[Place, Tensor]], down: Tensor | None) -> None:
        """Add U D to the rows of matrices.

        Args:
            places: each with its rows of U, [outputs, rank].
            down: D [rank, inputs]; None: the identity.

        Raises:
            ModelError: a matrix has another change that cannot be together with this one.
        """
        for place, up in places:
            begin = 0
            if down is not None:
                begin = self._begin_of(place, down)
            elif place.number in self._parts:
                raise ModelError("a matrix is both saved whole and changed by low-rank products")
            part = Part(place.first, _own(self._rows(place, up)), begin)
            self._parts.setdefault(place.number, []).append(part)

    def add_gain(self, places: list[tuple[Place, Tensor]]) -> None:
        """Multiply rows of matrices by gains [outputs]."""
        for place, gain in places:
            self._write(self._gains, place, gain, 1.0)

    def add_shift(self, places: list[tuple[Place, Tensor]]) -> None:
        """Add [outputs] to the results of rows of matrices."""
        for place, shift in places:
            if place.parallel is Parallel.ROW and self._places.rank.rank > 0:
                continue  # the results are summed over the ranks
            self._write(self._shifts, place, shift, 0.0)

    def add_embedding(self, differences: Tensor) -> None:
        """Add [vocab_size, hidden_size] to the table of embeddings."""
        self._embedding = _own(differences)

    def finish(self) -> Adapter:
        """Return the adapter."""
        numbers = sorted({*self._parts, *self._gains, *self._shifts})
        changes = {}
        for number in numbers:
            downs = self._downs.get(number)
            changes[number] = LinearChange(
                None if downs is None else _own(torch.cat(downs)),
                tuple(sorted(self._parts.get(number, ()), key=lambda part: part.first)),
                self._gains.get(number),
                self._shifts.get(number),
            )
        return Adapter(changes, self._embedding)

    def _begin_of(self, place: Place, down: Tensor) -> int:
        """Return the first row of a `down` in that of its matrix; equal ones are there once."""
        rank, begin = self._places.rank, 0
        if place.parallel is Parallel.ROW:
            down = down.chunk(rank.count, 1)[rank.rank]
        if place.number in self._parts and place.number not in self._downs:
            raise ModelError("a matrix is both saved whole and changed by low-rank products")
        for other in self._downs.setdefault(place.number, []):
            if other.data_ptr() == down.data_ptr():
                return begin
            begin += len(other)
        self._downs[place.number].append(down)
        return begin

    def _rows(self, place: Place, values: Tensor) -> Tensor:
        """Return the rows of this rank."""
        rank = self._places.rank
        if place.parallel is Parallel.COLUMN:
            return values.chunk(rank.count)[rank.rank]
        return values

    def _write(
        self, vectors: dict[int, Tensor], place: Place, values: Tensor, other: float
    ) -> None:
        """Write values of a place's rows to its matrix's vector, which is `other` elsewhere."""
        rows = self._rows(place, values)
        vector = vectors.get(place.number)
        if vector is None:
            size = self._places.outputs[place.number]
            vector = vectors[place.number] = torch.full((size,), other)
        vector[place.first : place.first + len(rows)] = rows


def _own(tensor: Tensor) -> Tensor:
    """Return a contiguous float32 tensor that shares no memory with a file or a larger tensor."""
    return tensor.to(torch.float32, copy=True).contiguous()


def shown(places: list[tuple[Place, Tensor]]) -> Iterator[str]:
    """Yield the sizes of places, for errors."""
    for place, _ in places:
        yield f"[{place.outputs}, {place.inputs}]"
