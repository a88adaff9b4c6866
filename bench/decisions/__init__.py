"""Questions with known answers, and what many questions cost: `python -m bench.decisions`."""
