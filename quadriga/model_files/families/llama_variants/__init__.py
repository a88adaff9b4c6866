"""Families whose blocks are Llama's with other scales, biases, norms, positions or windows."""
