"""Tiny random models that make text and rank, with the files of Qwen3-Reranker."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from tests.tiny_models import tiny_qwen3

CONTEXT_LENGTH = 1024
INSTRUCTION = "Find what answers."
PAIR_TEMPLATE = (
    "{%- for message in messages if message.role == 'system' %}"
    "{{ message.content }}\n{% endfor -%}"
    "<|im_start|>Query: {{ (messages | selectattr('role', 'eq', 'query') | first).content }}\n"
    "Document: {{ (messages | selectattr('role', 'eq', 'document') | first).content }}<|im_end|>\n"
)


def qwen3_reranker(directory: Path, config: dict[str, Any] | None = None) -> Path:
    """Write a model whose tokenizer has yes and no; its name, or `config`, says that it ranks."""
    tiny_qwen3(directory, max_position_embeddings=CONTEXT_LENGTH)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in ("yes", "no")])
    tokenizer.save(str(directory / "tokenizer.json"))
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (config or {})))
    return directory


def sentence_reranker(directory: Path) -> Path:
    """Write one as sentence-transformers saves it, which names the tokens and has a template."""
    qwen3_reranker(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = {f"{kind}_token_id": tokenizer.token_to_id(word)
           for kind, word in (("true", "yes"), ("false", "no"))}  # fmt: skip
    transformer = "sentence_transformers.base.modules.transformer.Transformer"
    score = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": transformer},
        {"idx": 1, "name": "1", "path": "1_LogitScore", "type": score},
    ]
    settings = {
        "model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.linear.Identity",
        "prompts": {"own": INSTRUCTION}, "default_prompt_name": "own",
    }  # fmt: skip
    (directory / "1_LogitScore").mkdir()
    for name, content in (
        ("modules.json", modules),
        ("1_LogitScore/config.json", ids),
        ("config_sentence_transformers.json", settings),
    ):
        (directory / name).write_text(json.dumps(content))
    (directory / "chat_template.jinja").write_text(PAIR_TEMPLATE)
    return directory
