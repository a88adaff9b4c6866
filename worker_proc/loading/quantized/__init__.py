"""Read the quantized layers of safetensors checkpoints, one file for each method."""
