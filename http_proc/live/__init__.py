"""The live feed for web pages: one subscription at the ring, shared by all viewers."""
