"""Numbers that are spread evenly, in place of random ones."""

# Its multiples, without their whole parts, are spread evenly.
GOLDEN_RATIO = 0.6180339887498949


class Spread:
    """Numbers from 0 to 1, the same in each run, of which any few that follow are far apart."""

    def __init__(self) -> None:
        self._count = 0

    def next(self) -> float:
        """Return the next number."""
        self._count += 1
        return self._count * GOLDEN_RATIO % 1
