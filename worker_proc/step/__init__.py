"""One step: the slots, its inputs and outputs, the contract of an engine, and the runner."""
