"""Formats of a model's files: Hugging Face directories, GGUF, tokenizers, quantized checkpoints."""
