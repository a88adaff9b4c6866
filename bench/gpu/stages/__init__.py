"""The stages of bench.gpu.all, and the report of what came of them."""
