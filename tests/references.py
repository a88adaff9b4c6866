"""What transformers generates for a prompt alone, which every engine has to give too."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig


@torch.inference_mode()
def greedy_of(model: Any, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Return the greedy tokens after each prompt; an end-of-text token ends none of them.

    Args:
        model: a model of transformers, or the directory to load one from in float32.
        prompts: token ids; each prompt is computed alone.
        num_tokens: number of tokens to generate for each prompt.
    """
    if isinstance(model, Path):
        model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=num_tokens, pad_token_id=0
    )
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids))
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs
