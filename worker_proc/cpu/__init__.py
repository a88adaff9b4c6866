"""Run the model on a CPU: C++ kernels that execute it as a list of operations in every step."""
