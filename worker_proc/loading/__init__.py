"""Load checkpoints into models: safetensors, GGUF, quantized, one rank's part."""
