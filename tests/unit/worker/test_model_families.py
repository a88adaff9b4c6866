"""The places that list the model families agree."""

import re
from pathlib import Path

from quadriga.server.models.families.architectures import CONFIGS
from quadriga.server.models.formats.gguf_config import _CONFIGS
from tests.tiny_experts import EXPERTS
from tests.tiny_models import FAMILIES
from worker_proc.loading.checkpoints import _GGUF_NAMES

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_the_page_of_supported_models_lists_the_registered_families() -> None:
    page = (DOCS / "supported.md").read_text()
    models = page.split("\n## ")[1]
    assert re.findall(r"^\| `(\w+)` \|", models, re.M) == list(CONFIGS)


def test_a_family_of_a_gguf_has_a_config_names_of_tensors_and_an_architecture() -> None:
    # A `llama` with a window is a `mistral`.
    assert _CONFIGS.keys() | {"mistral"} == _GGUF_NAMES.keys()
    assert _CONFIGS.keys() <= CONFIGS.keys()


def test_each_family_is_tested() -> None:
    # A `gemma3` is a `gemma3_text` with images.
    assert CONFIGS.keys() - {"gemma3"} == {*FAMILIES, *EXPERTS}
