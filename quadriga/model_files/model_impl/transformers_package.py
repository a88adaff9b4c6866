"""What the installed package transformers can run, read from its sources without importing it.

Importing transformers takes seconds and loads torch. The list of its causal language models is a
literal in `models/auto/modeling_auto.py`, and each model's source shows its features.
"""

import ast
import re
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

_LIST_OF_MODELS = "models/auto/modeling_auto.py"
_NAME_OF_LIST = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"


@dataclass(frozen=True, slots=True)
class PackageModel:
    """A causal language model of the package.

    Attributes:
        class_name: Such as LlamaForCausalLM.
        has_attention_interface: Its attention function can be chosen.
        has_own_cache: It keeps a state that grows by other rules than keys and values.
    """

    class_name: str
    has_attention_interface: bool
    has_own_cache: bool


@dataclass(frozen=True, slots=True)
class TransformersPackage:
    """The installed package.

    Attributes:
        version: Such as 5.0.0.
        root: Its directory.
    """

    version: str
    root: Path

    def find_model(self, model_type: str) -> PackageModel | None:
        """Return the causal language model of a `model_type`, or None if there is none."""
        class_name = _class_names(self.root).get(model_type)
        source = _sources_of_classes(self.root).get(class_name or "")
        if class_name is None or source is None:
            return None
        text = source.read_text(encoding="utf-8")
        return PackageModel(
            class_name,
            has_attention_interface="ALL_ATTENTION_FUNCTIONS" in text,
            has_own_cache=bool(re.search(r"^ +_is_stateful = True", text, re.M)),
        )


def find_transformers() -> TransformersPackage | None:
    """Return the installed package; None without one."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return None
    return TransformersPackage(version("transformers"), Path(spec.origin).parent)


@cache
def _class_names(root: Path) -> dict[str, str]:
    """Return the class of each `model_type` of a causal language model."""
    tree = ast.parse((root / _LIST_OF_MODELS).read_text(encoding="utf-8"))
    for node in tree.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        if names == [_NAME_OF_LIST]:
            return dict(ast.literal_eval(node.value.args[0]))
    return {}


@cache
def _sources_of_classes(root: Path) -> dict[str, Path]:
    """Return the file that defines each causal language model."""
    wanted = set(_class_names(root).values())
    found: dict[str, Path] = {}
    for source in (root / "models").glob("*/modeling_*.py"):
        for name in re.findall(r"^class (\w+)\(", source.read_text(encoding="utf-8"), re.M):
            if name in wanted:
                found[name] = source
    return found
