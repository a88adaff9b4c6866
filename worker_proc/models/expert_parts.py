"""Cut the weights of a layer's experts that a checkpoint stacks into one tensor."""

from collections.abc import Iterator

from torch import Tensor

from quadriga.model_files.config.decoder_config import DecoderConfig


def expert_parts(
    config: DecoderConfig, name: str, tensor: object
) -> Iterator[tuple[str, Tensor]] | None:
    """Return the names and tensors of each expert; None if the stored tensor is not stacked.

    Args:
        config: The model, whose `names` has "experts_gate_up" and "experts_down".
        name: The stored name.
        tensor: [experts, outputs, inputs], [experts, inputs, outputs] or a bias
            [experts, outputs], or packed rows, which are never stacked.
    """
    if not isinstance(tensor, Tensor):
        return None
    for key in ("experts_gate_up", "experts_down"):
        layer, found, end = name.partition(f".{config.names.get(key)}")
        if found and end in ("", ".weight", "_bias"):
            return _parts(config, layer, tensor, key, "bias" if end == "_bias" else "weight")
    return None


def _parts(
    config: DecoderConfig, layer: str, tensor: Tensor, key: str, kind: str
) -> Iterator[tuple[str, Tensor]]:
    experts = config.experts
    assert experts is not None
    for number, rows in enumerate(tensor):
        if experts.transposed and kind == "weight":
            rows = rows.t()
        parts = {"expert_down": rows}
        if key == "experts_gate_up":
            halves = (rows[::2], rows[1::2]) if experts.interleaved else rows.chunk(2)
            parts = dict(zip(("expert_gate", "expert_up"), halves, strict=True))
        expert = f"{layer}.{config.name('expert').format(number)}"
        for part, values in parts.items():
            yield f"{expert}.{config.name(part)}.{kind}", values
