"""The model on a card: Triton kernels, CUDA graphs, and steps that are launched ahead."""
