"""Random numbers of torch that are the same each time."""

import torch


def seeded_generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator of random numbers.

    torch.Generator cannot be called before rng_prims is imported, which `import torch` does through
    modules that the worker defers (startup/torch_import.py).
    """
    import torch._prims.rng_prims

    return torch.Generator(device).manual_seed(seed)
