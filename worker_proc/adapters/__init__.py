"""Adapters (LoRA): what they change in a model's matrices, and how they are read from files."""
