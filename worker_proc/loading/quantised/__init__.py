"""Read the quantised layers of safetensors checkpoints, one file for each method."""
