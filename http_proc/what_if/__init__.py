"""`/v1/what_if`: the last minutes' load in the simulator, with other flags."""
