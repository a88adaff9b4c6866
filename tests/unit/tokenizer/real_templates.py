"""The chat templates of published models, and how an answer ends in each."""

from pathlib import Path

DIRECTORY = Path(__file__).parents[2] / "fixtures" / "chat_templates"
FILES = sorted(DIRECTORY.glob("*.jinja"))
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
ENDS = (
    "</s>",
    "<|im_end|>",
    "<|end_of_text|>",
    "<|return|>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
    "<|tool_response>",
)
# Calls and answers of tools are written in words of this server.
WITHOUT_TOOLS = ("deepseek-v3.1", "phi-3.5-mini", "smollm3")
