"""The engine for a GPU: Triton kernels, CUDA graphs, and attention over pages."""
