"""Where an adapter's matrices belong in a model.

`Places` finds the rows of a model's matrices by the names that the checkpoint has for them, and
`Assembly` puts changes together there: fused, permuted and transposed as the checkpoint's tensors
are, and cut into the part of one rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quadriga.errors import ModelError
from quadriga.server.models.families.decoder_config import DecoderConfig
from worker_proc.adapters.change import Adapter, LinearChange, Part
from worker_proc.loading.sharding import WHOLE, TPRank
from worker_proc.models.base import Model, checkpoint_parts, part_names, plain_name
from worker_proc.models.decoder import Decoder
from worker_proc.models.layers import Linear, Parallel


@dataclass(frozen=True, slots=True)
class Place:
    """The rows of a matrix that one matrix of the checkpoint fills.

    Attributes:
        name: in the checkpoint, without `.weight` and what `plain_name` removes; of a part of a
            fused matrix, the name that `part_names` has for it.
        number: of the matrix, in `Model.matrices`.
        first: its first row, in the part of this rank.
        outputs, inputs: the whole size of the checkpoint's matrix, over all ranks.
        parallel: how the matrix is split over the ranks.
        has_bias: the matrix has a bias.
    """

    name: str
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
        by_name: by their names.
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
                name,
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

    def size_of(self, name: str) -> tuple[int, int] | None:
        """Return outputs and inputs of a matrix of the checkpoint; None if there is none.

        Args:
            name: as it is stored, without `.weight`.
        """
        places = [self.by_name.get(part) for part in self._part_names(name)]
        sizes = [(place.outputs, place.inputs) for place in places if place is not None]
        if len(sizes) < len(places):
            return None
        return sum(outputs for outputs, _ in sizes), sizes[0][1]

    def stored_names(self) -> list[str]:
        """Return the names of the checkpoint's matrices of layers, but those of experts."""
        fused = {
            f".{self.config.name(part)}": f".{self.config.names[key]}"
            for key, parts in (("qkv", ("q", "k", "v")), ("gate_up", ("gate", "up")))
            if key in self.config.names
            for part in parts
        }
        names = []
        for name in self.by_name:
            end = next((end for end in fused if name.endswith(end)), "")
            if self.is_in_layers(name) and ".experts." not in name:
                names.append(name.removesuffix(end) + fused.get(end, ""))
        return list(dict.fromkeys(names))

    def parts(self, name: str, tensor: Tensor) -> list["PlacedRows"]:
        """Return the places that a matrix of the checkpoint fills, each with its rows of a tensor.

        Args:
            name: as it is stored, without `.weight`; `size_of` has its size.
            tensor: `[outputs, …]`.
        """
        kind = "bias" if tensor.dim() == 1 else "weight"
        if kind == "weight" and self.config.transposed and self.is_in_layers(name):
            tensor = tensor.t()  # as the checkpoint has weights
        found = []
        for part, rows in checkpoint_parts(self.config, f"{name}.{kind}", tensor):
            assert isinstance(rows, Tensor)
            found.append((self.by_name[part.removesuffix(f".{kind}")], rows))
        return found

    def expert_parts(self, layer: str, key: str, number: int, rows: Tensor) -> list["PlacedRows"]:
        """Return the places of a matrix of an expert, each with its rows of a tensor.

        Args:
            layer: the name of the layer, as it is stored.
            key: "gate_up" or "down".
            number: of the expert.
            rows: `[outputs, …]`.
        """
        experts, name = self.config.experts, self.config.name
        assert experts is not None
        expert = f"{plain_name(self.config, layer)}.{name('expert').format(number)}"
        if key == "down":
            return [(self.by_name[f"{expert}.{name('expert_down')}"], rows)]
        gate, up = (rows[::2], rows[1::2]) if experts.interleaved else rows.chunk(2)
        return [
            (self.by_name[f"{expert}.{name('expert_gate')}"], gate),
            (self.by_name[f"{expert}.{name('expert_up')}"], up),
        ]

    def is_in_layers(self, name: str) -> bool:
        """Return whether a stored name is of a matrix of a layer."""
        return plain_name(self.config, name).startswith(f"{self.config.name('layers')}.")

    def _part_names(self, name: str) -> tuple[str, ...]:
        return part_names(self.config, plain_name(self.config, name))


PlacedRows = tuple[Place, Tensor]


class Assembly:
    """Puts the changes of an adapter together for one rank."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._downs: dict[int, list[Tensor]] = {}
        self._parts: dict[int, list[Part]] = {}
        self._gains: dict[int, Tensor] = {}
        self._shifts: dict[int, Tensor] = {}
        self._embedding: Tensor | None = None

    def add(self, places: list[PlacedRows], down: Tensor | None) -> None:
        """Add U D to the rows of matrices.

        Args:
            places: each with its rows of U, [outputs, rank].
            down: D [rank, inputs]; None: the identity.

        Raises:
            ModelError: the rows have another change.
        """
        for place, up in places:
            begin = 0
            if down is not None:
                begin = self._begin_of(place, down)
            elif place.number in self._parts:
                raise _changed_twice(place)
            part = Part(place.first, _own(self._rows(place, up)), begin)
            rows, others = part.rows, self._parts.setdefault(place.number, [])
            if any(rows.start < o.rows.stop and o.rows.start < rows.stop for o in others):
                raise _changed_twice(place)
            others.append(part)

    def add_gain(self, places: list[PlacedRows]) -> None:
        """Multiply rows of matrices by gains [outputs]."""
        for place, gain in places:
            rows = self._rows(place, gain)
            self._vector(self._gains, place, len(rows), 1.0).copy_(rows)

    def add_shift(self, places: list[PlacedRows]) -> None:
        """Add [outputs] to the results of rows of matrices."""
        for place, shift in places:
            if place.parallel is Parallel.ROW and self._places.rank.rank > 0:
                continue  # the results are summed over the ranks
            rows = self._rows(place, shift)
            self._vector(self._shifts, place, len(rows), 0.0).add_(rows)

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
                None if downs is None else torch.cat(downs).float(),
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
            raise _changed_twice(place)
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

    def _vector(
        self, vectors: dict[int, Tensor], place: Place, size: int, unchanged: float
    ) -> Tensor:
        """Return a view of `size` rows of a place in its matrix's vector, made at first use."""
        if place.number not in vectors:
            vectors[place.number] = torch.full((self._places.outputs[place.number],), unchanged)
        return vectors[place.number][place.first : place.first + size]


def _changed_twice(place: Place) -> ModelError:
    return ModelError(
        f"it changes {place.name} in two ways, by modules_to_save, target_modules or"
        " trainable_token_indices, which is not supported: leave it out of all but one of them"
    )


def _own(tensor: Tensor) -> Tensor:
    """Return a contiguous float32 tensor that shares no memory with a file or a larger tensor."""
    return tensor.to(torch.float32, copy=True).contiguous()
