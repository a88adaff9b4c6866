"""Gemma 3's text model: Gemma 2 with normalised heads and rotary positions of two kinds.

Gemma team 2025, https://arxiv.org/abs/2503.19786. Scores and logits are not bounded.
"""

from worker_proc.models.gemma2 import Gemma2

# Of a checkpoint that also reads images.
IMAGE_PARTS = ("vision_tower.", "multi_modal_projector.")


class Gemma3(Gemma2):
    """Gemma 2 with normalised query and key heads.

    Of a checkpoint that also reads images, the text model alone is loaded.
    """

    head_norms = True

    def map_weight_name(self, name: str) -> str | None:
        if name.removeprefix("model.").startswith(IMAGE_PARTS):
            return None
        return super().map_weight_name(name.replace("language_model.", ""))
