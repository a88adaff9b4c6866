"""Read an adapter as PEFT writes it: adapter_config.json, and the tensors of each module.

A module's tensors are named by its path in a model of transformers: lora_A [rank, inputs] and
lora_B [outputs, rank], whose product is scaled, lora_magnitude_vector [outputs] of DoRA, and for
embeddings lora_embedding_A [rank, entries] and lora_embedding_B [channels, rank]. Modules and
biases that were trained whole have their own names. Source: PEFT 0.21, `peft/tuners/lora`.
"""

import io
import logging
import pickle
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quadriga.errors import ModelError, quoted
from quadriga.server.models.adapters.content import SAFETENSORS_NAME, AdapterContent, check_rank
from quadriga.server.models.adapters.peft_config import (
    BASE_BIAS,
    BASE_WEIGHT,
    BIAS,
    DOWN,
    EMBEDDING_DOWN,
    EMBEDDING_UP,
    MAGNITUDE,
    PREFIX,
    TOKENS,
    UP,
    UP_BIAS,
    WEIGHT,
    PeftConfig,
    split_name,
)
from quadriga.server.models.families.decoder_config import NAMES
from worker_proc.adapters.base_tensors import BaseTensors
from worker_proc.adapters.change import Adapter
from worker_proc.adapters.places import Assembly, Place, PlacedRows, Places
from worker_proc.loading.loader import shown_names
from worker_proc.models.base import plain_name

# What precedes the experts in the path of a module.
_LAYER = re.compile(r"(?P<layer>(?:.*\.)?layers\.\d+)\..*")
_STACKED = ("experts_gate_up", "experts_down")
# Paths of routers in transformers 5; in a checkpoint, they may have others.
_LLAMA_MODULE = re.compile(r"(?:.*\.)?layers\.(?P<number>\d+)\.(?P<module>.*)")
_LLAMA_KEYS = {NAMES[key]: key for key in ("q", "k", "v", "out", "gate", "up", "down")}
_ROUTERS = tuple(f".{b}.{r}" for b in ("mlp", "block_sparse_moe") for r in ("gate", "router"))

ModuleTensors = dict[str, Tensor]


def read_peft(
    content: AdapterContent, places: Places, base: BaseTensors, max_rank: int | None
) -> Adapter:
    """Return an adapter of PEFT for a model.

    Args:
        content: of a directory.
        places: of the model.
        base: of the model.
        max_rank: the largest rank that is served; None: there is no limit.

    Raises:
        ModelError: the adapter is broken, or does not fit the model; the message has to be put
            behind its path.
    """
    assert content.config is not None
    return _Reader(content, content.config, places, base, max_rank).read()


def load_tensors(content: AdapterContent) -> dict[str, Tensor]:
    """Return the tensors of an adapter of PEFT by their names in the file.

    Raises:
        ModelError: the file is damaged, or has something that is no tensor.
    """
    if content.weights_name == SAFETENSORS_NAME:
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            tensors: dict[str, Any] = load(content.weights)
        except SafetensorError as error:
            raise ModelError(f"{content.weights_name}: {error}; save the adapter again") from None
        return tensors
    try:
        tensors = torch.load(io.BytesIO(content.weights), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(
            f"{content.weights_name} is damaged, or has more than tensors: {reason}; save it as"
            f" {SAFETENSORS_NAME}"
        ) from None
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str)
        and isinstance(tensor, Tensor)
        and tensor.layout == torch.strided
        and tensor.is_floating_point()
        for name, tensor in tensors.items()
    ):
        raise ModelError(
            f"{content.weights_name} has more than numbers by their names; save it as"
            f" {SAFETENSORS_NAME}"
        )
    return tensors


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise ModelError for a tensor with NaN or infinity."""
    if not bool(tensor.isfinite().all()):
        raise ModelError(f"{name} has values that are NaN or infinite; train or save it again")


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix of the checkpoint.

    Attributes:
        size: outputs and inputs.
        place: returns the places of rows [outputs, …].
        is_head: it is that of the logits.
    """

    size: tuple[int, int]
    place: Callable[[Tensor], list[PlacedRows]]
    is_head: bool = False


class _Reader:
    def __init__(
        self,
        content: AdapterContent,
        config: PeftConfig,
        places: Places,
        base: BaseTensors,
        max_rank: int | None,
    ) -> None:
        self._content, self._config = content, config
        self._places, self._base = places, base
        self._max_rank = max_rank
        self._assembly = Assembly(places)
        self._tables: list[Tensor] = []  # differences of the embedding
        self._trains_head_tokens = False  # apart from the embedding's

    def read(self) -> Adapter:
        modules, unknown = self._modules()
        self._trains_head_tokens = any(
            self._find(module) == self._places.config.name("head") and TOKENS in tensors
            for module, tensors in modules.items()
        )
        passed_over = [name for name in modules if self._is_passed_over(name, modules[name])]
        if passed_over:
            logging.warning(
                "an adapter changes %d modules that texts do not need, and which are left out: %s",
                len(passed_over),
                shown_names(passed_over),
            )
        for module, tensors in modules.items():
            if module not in passed_over and not self._add(module, tensors):
                unknown += [f"{PREFIX}{module}.{kind}" for kind in tensors]
        if unknown:
            raise ModelError(
                f"it has {len(unknown)} tensors that match nothing that can be changed here:"
                f" {shown_names(unknown)}; {self._made_for()}"
            )
        if not modules:
            raise ModelError("it has no tensors: save the adapter again by save_pretrained")
        self._check_targets(modules)
        self._base.read()
        if self._tables:
            self._assembly.add_embedding(torch.stack(self._tables).sum(0))
        return self._assembly.finish()

    def _modules(self) -> tuple[dict[str, ModuleTensors], list[str]]:
        """Return the tensors of each module by their kinds, and the names of all others."""
        modules: dict[str, ModuleTensors] = defaultdict(dict)
        unknown = []
        for name, tensor in load_tensors(self._content).items():
            check_finite(name, tensor)
            if (parts := split_name(name)) is None:
                unknown.append(name)
            else:
                module, kind = parts
                modules[module][kind] = tensor
        return modules, unknown

    def _add(self, module: str, tensors: ModuleTensors) -> bool:
        """Add the change of a module. Return False if the model has no such module."""
        if (layer := self._layer_of_experts(module)) is not None:
            return self._add_experts(layer, module, tensors)
        name = self._find(module)
        if name is None:
            is_norm = tensors.keys() == {BIAS} and self._config.bias == "all"
            if is_norm:
                bias = plain_name(self._places.config, f"{module}.bias")
                self._base.need(bias, partial(self._check_same, module, tensors[BIAS]))
            return is_norm
        if name == self._places.config.name("embedding"):
            return self._add_embedding(module, tensors)
        if name == self._places.config.name("head"):
            return self._add_head(module, tensors)
        size = self._places.size_of(name)
        assert size is not None
        matrix = _Matrix(size, partial(self._places.parts, name))
        return self._add_matrix(module, matrix, tensors)

    def _is_passed_over(self, module: str, tensors: ModuleTensors) -> bool:
        """Return whether a module is of a part of the model that is not computed, as for images."""
        plain = plain_name(self._places.config, module)
        is_product = tensors.keys() <= {DOWN, UP, UP_BIAS, MAGNITUDE}
        return is_product and plain.startswith(self._places.config.skipped_starts)

    def _find(self, module: str) -> str | None:
        """Return the stored name of a module; of embedding and head, their plain names."""
        config = self._places.config
        names = [module, f"model.{module}"]
        llama = _LLAMA_MODULE.fullmatch(module) if config.has_llama_modules else None
        if llama is not None and (key := _LLAMA_KEYS.get(llama["module"])) is not None:
            names.append(f"{config.name('layers')}.{llama['number']}.{config.name(key)}")
        for end in _ROUTERS:
            if config.experts is not None and module.endswith(end):
                names.append(f"{module.removesuffix(end)}.{config.name('router')}")
        for name in names:
            plain = plain_name(config, name)
            if plain == config.name("embedding"):
                return plain
            if plain == config.name("head") and self._places.head is not None:
                return plain
            if self._places.size_of(name) is not None and plain not in (
                config.name("positions"),
                config.name("token_types"),
            ):
                return name
        return None

    # --- matrices ---

    def _add_matrix(self, module: str, matrix: "_Matrix", tensors: ModuleTensors) -> bool:
        """Add the change of a matrix; return False if it has tensors that are not supported."""
        outputs, inputs = matrix.size
        vectors, wholes = {MAGNITUDE, UP_BIAS, BASE_BIAS, BIAS}, {WEIGHT, BASE_WEIGHT}
        if not tensors.keys() <= {DOWN, UP} | vectors | (wholes if matrix.is_head else set()):
            return False
        for kind, tensor in tensors.items():
            if kind in vectors | wholes:
                expected = (outputs,) if kind in vectors else matrix.size
                self._check_shape(module, kind, tensor, expected)
        values = {kind: tensor.float() for kind, tensor in tensors.items()}
        down, up = self._product(module, values, outputs, inputs)
        self._check_magnitude(module, tensors, up is not None)
        if up is not None:
            self._assembly.add(matrix.place(up), down)
        if (bias := values.get(UP_BIAS)) is not None:
            if MAGNITUDE in values:
                raise ModelError(f"{module} has {UP_BIAS} and {MAGNITUDE}: leave out lora_bias")
            self._assembly.add_shift(matrix.place(bias * self._config.scaling_of(module)))
        self._add_from_base(matrix, values, down, up)
        return True

    def _add_from_base(
        self, matrix: "_Matrix", values: ModuleTensors, down: Tensor | None, up: Tensor | None
    ) -> None:
        """Add what depends on the base's tensors, too, when they are read."""
        if (magnitude := values.get(MAGNITUDE)) is not None:
            outputs, _ = matrix.size
            ups = matrix.place(torch.zeros(outputs, 0) if up is None else up)
            for (place, rows), (_, of_rows) in zip(matrix.place(magnitude), ups, strict=True):
                take = partial(self._add_gain, place, rows, down, of_rows)
                self._base.need(f"{place.name}.weight", take)
        if (bias := values.get(BASE_BIAS, values.get(BIAS))) is not None:
            for place, rows in matrix.place(bias):
                self._base.need(f"{place.name}.bias", partial(self._add_new_bias, place, rows))
        if (weight := values.get(WEIGHT, values.get(BASE_WEIGHT))) is not None:
            for place, rows in matrix.place(weight):
                self._base.need(f"{place.name}.weight", partial(self._add_new_weight, place, rows))

    def _product(
        self, module: str, tensors: ModuleTensors, outputs: int, inputs: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return D and the scaled U of a module; None for both if it has none."""
        down, up = tensors.get(DOWN), tensors.get(UP)
        if down is None and up is None:
            return None, None
        if down is None or up is None:
            raise ModelError(
                f"{module} has {UP if down is None else DOWN}, but not the other one of {DOWN} and"
                f" {UP}; save the adapter again"
            )
        rank = self._check_rank(module, len(down))
        self._check_shape(module, DOWN, down, (rank, inputs))
        self._check_shape(module, UP, up, (outputs, rank))
        return down, up * self._config.scaling_of(module)

    def _check_rank(self, module: str, rank: int) -> int:
        named = self._config.rank_of(module)
        if rank != named:
            raise ModelError(
                f"{module} has rank {rank}, and its config says {named}: adapter_config.json is of"
                " another adapter"
            )
        check_rank(rank, self._max_rank)
        return rank

    def _check_magnitude(self, module: str, tensors: ModuleTensors, is_changed: bool) -> None:
        """Check that a module has a magnitude where the config says so, and nowhere else."""
        if is_changed and self._config.uses_dora != (MAGNITUDE in tensors):
            has = "has" if MAGNITUDE in tensors else "has no"
            raise ModelError(
                f"{module} {has} {MAGNITUDE}, and its config says use_dora ="
                f" {self._config.uses_dora}: adapter_config.json is of another adapter"
            )

    def _check_shape(
        self, module: str, kind: str, tensor: Tensor, expected: tuple[int, ...]
    ) -> None:
        if tuple(tensor.shape) != expected:
            raise ModelError(
                f"{module}.{kind} is {list(tensor.shape)}, and the model needs {list(expected)};"
                f" {self._made_for()}"
            )

    def _made_for(self) -> str:
        base = self._config.base
        return f"its base_model_name_or_path is {quoted(base)}" if base else "it names no base"

    def _add_gain(
        self, place: Place, magnitude: Tensor, down: Tensor | None, up: Tensor, weight: Tensor
    ) -> None:
        """Add the gain of DoRA: magnitude / row norms of W + U D."""
        if down is not None:
            weight = torch.addmm(weight, up, down)
        self._assembly.add_gain([(place, magnitude / weight.norm(dim=1))])

    def _add_new_bias(self, place: Place, bias: Tensor, stored: Tensor) -> None:
        self._assembly.add_shift([(place, bias - stored)])

    def _add_new_weight(self, place: Place, weight: Tensor, stored: Tensor) -> None:
        if bool((differences := weight - stored).any()):
            self._assembly.add([(place, differences)], None)

    def _check_same(self, module: str, bias: Tensor, stored: Tensor) -> None:
        if not torch.equal(bias.float(), stored):
            raise ModelError(
                f"{module}.bias is of a norm, and trained (bias = 'all'), which is not supported:"
                " train it with bias = 'lora_only'"
            )

    # --- embedding and head ---

    def _add_head(self, module: str, tensors: ModuleTensors) -> bool:
        place = self._places.head
        assert place is not None
        if (vectors := tensors.get(TOKENS)) is not None:
            take = partial(self._add_tokens_of_head, place, *self._trained(module, vectors))
            self._base.need(f"{place.name}.weight", take)
            return tensors.keys() == {TOKENS}
        size = (place.outputs, place.inputs)
        matrix = _Matrix(size, lambda rows: [(place, rows)], is_head=True)
        return self._add_matrix(module, matrix, tensors)

    def _add_embedding(self, module: str, tensors: ModuleTensors) -> bool:
        kinds = {EMBEDDING_DOWN, EMBEDDING_UP, MAGNITUDE, TOKENS, WEIGHT, BASE_WEIGHT}
        if not tensors.keys() <= kinds:
            return False
        place = self._places.embedding
        base_name = f"{self._places.config.name('embedding')}.weight"
        entries, channels = place.outputs, place.inputs
        weight = tensors.get(WEIGHT, tensors.get(BASE_WEIGHT))
        if weight is not None:
            self._check_shape(module, WEIGHT, weight, (entries, channels))
            self._base.need(base_name, partial(self._add_new_table, weight.float()))
        if (vectors := tensors.get(TOKENS)) is not None:
            self._add_tokens(*self._trained(module, vectors))
        down, up = tensors.get(EMBEDDING_DOWN), tensors.get(EMBEDDING_UP)
        if down is None and up is None:
            return True
        if down is None or up is None:
            raise ModelError(f"{module} lacks one of {EMBEDDING_DOWN} and {EMBEDDING_UP}")
        rank = self._check_rank(module, len(down))
        self._check_shape(module, EMBEDDING_DOWN, down, (rank, entries))
        self._check_shape(module, EMBEDDING_UP, up, (channels, rank))
        self._check_magnitude(module, tensors, True)
        product = down.float().t() @ (up.float() * self._config.scaling_of(module)).t()
        magnitude = tensors.get(MAGNITUDE)
        if magnitude is None:
            self._tables.append(product)
            return True
        self._check_shape(module, MAGNITUDE, magnitude, (channels,))
        self._base.need(base_name, partial(self._add_gained_table, magnitude.float(), product))
        return True

    def _add_new_table(self, weight: Tensor, stored: Tensor) -> None:
        if bool((differences := weight - stored).any()):
            self._tables.append(differences)

    def _add_gained_table(self, magnitude: Tensor, product: Tensor, stored: Tensor) -> None:
        """Add the difference that DoRA makes, whose magnitudes are of channels."""
        changed = stored + product
        self._tables.append(changed * (magnitude / changed.norm(dim=0)) - stored)

    # --- vectors of single tokens ---

    def _trained(self, module: str, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids of a module's trained tokens [tokens], and their vectors."""
        token_ids, place = self._config.trained_tokens_of(module), self._places.embedding
        self._check_shape(module, TOKENS, vectors, (len(token_ids), place.inputs))
        if token_ids and max(token_ids) >= place.outputs:
            raise ModelError(
                f"its config names the token id {max(token_ids)} in trainable_token_indices, and"
                f" ids of the model are 0 to {place.outputs - 1}; {self._made_for()}"
            )
        return torch.tensor(token_ids), vectors.float()

    def _add_tokens(self, token_ids: Tensor, vectors: Tensor) -> None:
        """Replace rows of the embedding, and of the head if it has no other rows of its own."""
        place = self._places.embedding

        def add(stored: Tensor) -> None:
            table = torch.zeros_like(stored)
            table[token_ids] = vectors - stored[token_ids]
            self._tables.append(table)

        self._base.need(f"{place.name}.weight", add)
        if self._places.head == place and not self._trains_head_tokens:
            take = partial(self._add_tokens_of_head, place, token_ids, vectors)
            self._base.need(f"{place.name}.weight", take)

    def _add_tokens_of_head(
        self, place: Place, token_ids: Tensor, vectors: Tensor, stored: Tensor
    ) -> None:
        """Replace rows of the head: by a product whose rank is their number."""
        up = torch.zeros(len(stored), len(token_ids))
        up[token_ids, torch.arange(len(token_ids))] = 1
        self._assembly.add([(place, up)], vectors - stored[token_ids])

    # --- experts ---

    def _layer_of_experts(self, module: str) -> str | None:
        """Return the layer whose stacked experts a module has; None if it has none."""
        config = self._places.config
        match = _LAYER.fullmatch(module)
        if config.experts is None or match is None:
            return None
        path = re.sub(r"(\.base_layer)+$", "", module)
        ends = [".experts", *(f".{config.names.get(key)}" for key in _STACKED)]
        return match["layer"] if path.endswith(tuple(ends)) else None

    def _add_experts(self, layer: str, module: str, tensors: ModuleTensors) -> bool:
        """Add the changes of one stacked weight of all experts of a layer.

        lora_A is [experts * rank, inputs], the ranks of an expert side by side; lora_B is
        [outputs, rank * experts], the experts of a rank side by side.
        """
        down, up = tensors.get(DOWN), tensors.get(UP)
        if down is None or up is None or len(tensors) != 2:
            return False
        experts, hidden = self._places.config.experts, self._places.config.hidden_size
        assert experts is not None
        count, inner = experts.num_experts, experts.intermediate_size * self._places.rank.count
        sizes = {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
        if len(down) % count or up.shape[1] != len(down):
            raise ModelError(
                f"{module} has {len(down)} rows of {DOWN} and {up.shape[1]} columns of {UP}, and"
                f" the model has {count} experts; {self._made_for()}"
            )
        rank = len(down) // count
        check_rank(rank, self._max_rank)
        downs = down.float().view(count, rank, -1)
        ups = up.float().view(len(up), rank, count).permute(2, 0, 1)
        found = (len(up), down.shape[1])
        key = next((key for key, size in sizes.items() if size == found), None)
        if key is None:
            # Earlier versions of PEFT took the outputs of [experts, outputs, inputs] for inputs.
            key = next((key for key, size in sizes.items() if size == found[::-1]), None)
            if key is None:
                raise ModelError(
                    f"{module} has a product {list(found)}, and the experts of the model are"
                    f" {[list(size) for size in sizes.values()]}; {self._made_for()}"
                )
            downs, ups = ups.mT, downs.mT
        scaling = self._expert_scaling(module, key, rank)
        for number in range(count):
            placed = self._places.expert_parts(layer, key, number, ups[number] * scaling)
            self._assembly.add(placed, downs[number].contiguous())
        return True

    def _expert_scaling(self, module: str, key: str, rank: int) -> float:
        """Return the scaling of a stacked weight, by the name of its parameter."""
        path = re.sub(r"(\.base_layer)+$", "", module)
        named = path if not path.endswith(".experts") else f"{path}.{key}_proj"
        if self._config.rank_of(named) != rank:
            raise ModelError(
                f"{named} has rank {rank}, and its config says {self._config.rank_of(named)}:"
                " adapter_config.json is of another adapter"
            )
        return self._config.scaling_of(named)

    # --- what the config names ---

    def _check_targets(self, modules: dict[str, ModuleTensors]) -> None:
        """Check that each projection that the config names has tensors."""
        targets = self._config.target_modules
        if isinstance(targets, str):
            return
        changed = {self._find(module) for module, kinds in modules.items() if DOWN in kinds}
        plain = {plain_name(self._places.config, name) for name in changed if name}
        for name in self._places.stored_names():
            if name in plain or not name.endswith(tuple(f".{target}" for target in targets)):
                continue
            if self._config.is_excluded(name) or not self._is_layer_changed(name):
                continue
            raise ModelError(
                f"its config names {name} in target_modules, and it has no tensors of it; save the"
                " adapter again"
            )

    def _is_layer_changed(self, name: str) -> bool:
        layers = self._config.layers
        number = re.search(r"\.(\d+)\.", name)
        return layers is None or (number is not None and int(number[1]) in layers)
