"""The model in C++, for CPUs: a list of operations that is run as a whole at every step."""
