"""EmbeddingGemma: a Gemma 3 whose tokens see the whole text, or a window on either side.

Vera et al. 2025, https://arxiv.org/abs/2509.20354.
"""

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from quadriga.server.models.families.config_values import require, setting
from quadriga.server.models.families.decoder_config import NAMES, DecoderConfig
from quadriga.server.models.families.llama import gemma3
from quadriga.server.models.families.windows import DEFAULT_WINDOW

PREFIX = "model."


def gemma3_text(config: dict[str, Any]) -> DecoderConfig:
    """Read the config.json of a Gemma 3 that reads no images: it makes text or vectors."""
    require(config, "use_bidirectional_attention", (False, None, True))
    if not config.get("use_bidirectional_attention"):
        return gemma3(config)
    window = int(setting(config, "sliding_window", DEFAULT_WINDOW)) // 2 + 1
    read = gemma3(config | {"use_bidirectional_attention": False, "sliding_window": window})
    names = {key: name.removeprefix(PREFIX) for key, name in (NAMES | dict(read.names)).items()}
    return replace(
        read,
        bidirectional=True,
        tie_word_embeddings=True,
        names=MappingProxyType(names),
        removed=(*read.removed, PREFIX),
        skipped_starts=(*read.skipped_starts, "lm_head."),
    )
