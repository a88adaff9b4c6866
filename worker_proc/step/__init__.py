"""The inputs and outputs of one step, and the engine contract."""
