"""LLM: a model in a program, served by processes that the program starts for itself.

with LLM("smollm2-135m") as llm:
    print(llm.generate("The capital of France is").text)
"""

from quadriga.llm.llm import LLM, LoRARequest, ServerFlags

__all__ = ["LLM", "LoRARequest", "ServerFlags"]
