"""One step: the slots, its inputs and outputs, and the engine contract."""
